"""The column names and rows of a table that is to be logged."""

from typing import Any

from trainer_lib.foundation.errors import ConfigurationError


def table_of(
    columns: list[str] | None, data: list[list[Any]] | None, dataframe: Any
) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and rows of a table, which may come as a data frame."""
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
    if columns is None or data is None:
        raise ConfigurationError("log_table needs columns and data, or a dataframe.")
    return list(columns), data
