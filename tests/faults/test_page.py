"""docs/faults.md shows exactly the recorded counts."""

from tests.faults.ledger import PAGE, Ledger, page, recorded


def test_the_page_shows_the_recorded_counts() -> None:
    assert PAGE.read_text() == page(recorded()), "run: python -m tests.faults.ledger"


def test_no_recorded_fault_lost_a_checkpoint_or_ran_code() -> None:
    tables = recorded()
    for counts in tables["kills"].values():
        assert counts["unloadable"] == 0
        assert counts["kills"] == counts["resumed"] == counts["equal"]
    assert all(counts["used"] == 0 and counts["noticed"] == counts["injected"] for counts in tables["damage"].values())
    for counts in tables["content"].values():
        assert counts["executed"] == 0
        assert counts["refused"] + counts["harmless"] == counts["injected"]
    assert all(counts["equal"] == counts["compared"] for counts in tables["runs"].values())
    assert all(counts["kept"] == counts["injected"] for counts in tables["guards"].values())
    assert all(counts["asked"] == counts["agreed"] == counts["equal"] for counts in tables["stops"].values())


def test_counts_of_a_row_add_up() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.note("runs", "a run", compared=1, equal=1)
    assert "| a run | 2 | 2 |" in page(ledger.tables)
