"""Records as a pandas DataFrame; pandas is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame


def data_frame(rows: Iterable[Mapping[str, object]], columns: Sequence[str] = ()) -> DataFrame:
    """Return a row of data for each mapping; `columns` are there, and in this order, also where no row has them."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise ConfigError("to_dataframe needs pandas, which is not installed here: pip install pandas") from error
    given = list(rows)
    return DataFrame(given, columns=list(dict.fromkeys([*columns, *(name for row in given for name in row)])))
