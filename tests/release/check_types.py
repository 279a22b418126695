"""Check that type checkers infer the type of no public name: `python -m tests.release.check_types`."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

# scikit-learn declares no types: what derives from its classes has bases that type checkers do not know.
_UNTYPED_BASES = "trainer_lib.sklearn."


def main() -> None:
    """Print the public names without a declared type, and exit with 1 if there are any."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    options = ["--verifytypes", "trainer_lib", "--ignoreexternal", "--outputjson"]
    # Pyright sees no package that is installed for editing, and looks for the others beside the one that it checks.
    paths = [sysconfig.get_path("purelib"), str(Path(__file__).parents[2])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, env=variables, check=False)
    report = json.loads(done.stdout)["typeCompleteness"]
    if not report["symbols"]:
        sys.exit("Pyright found no public name of trainer_lib.")
    wrong = 0
    for symbol in report["symbols"]:
        is_declared = symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]
        for found in () if is_declared else symbol["diagnostics"]:
            is_of_base = any(part in found["message"] for part in ("of base class", "of metaclass"))
            if not (is_of_base and symbol["name"].startswith(_UNTYPED_BASES)):
                wrong += 1
                print(f"{symbol['name']}: {found['message']}")
    print(f"Of the types of public names, {report['completenessScore']:.1%} are declared.")
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()
