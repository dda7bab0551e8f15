"""The per-document values of a record, paired with those of another. Arrow and numpy only: a table has millions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qbench.records.samples import FIELDS, Floats, Ints, as_floats, gold_logprobs, one_array, rows_of_tasks
from qbench.records.store import SAMPLES, StoredRecord, StoreError

GOLD_LOGPROB = "gold_logprob"
UNUSED = {"target", "response", "is_greedy", "bytes", "tokens"}


@dataclass(frozen=True)
class PairedDocuments:
    """The documents of one task in two records, in one order."""

    task: str
    ids: Ints  # [documents] as the second record counts them
    group: Ints  # [documents] which are the same document, where one occurs more than once
    values: dict[str, tuple[Floats, Floats]]  # by column that both have: before and after
    lost: tuple[str, ...] = ()  # columns that only the first record has
    gained: tuple[str, ...] = ()  # columns that only the second record has


@dataclass(frozen=True)
class OtherDocuments:
    """A task whose documents are not the same in two records."""

    task: str
    before: int
    after: int
    common: int


def pair_documents(before: StoredRecord, after: StoredRecord) -> Iterator[PairedDocuments | OtherDocuments]:
    """The documents of each task, paired by content."""
    tables = [_read(before), _read(after)]
    codes = _codes(tables)
    values = [_values(table) for table in tables]
    rows = [rows_of_tasks(table) for table in tables]
    none = np.empty(0, dtype=np.int64)
    columns = [name for name in values[0] if name in values[1]]
    lost, gained = (tuple(sorted(set(values[i]) - set(values[1 - i]))) for i in (0, 1))
    for task in dict.fromkeys([*rows[0], *rows[1]]):
        order = [
            own[np.argsort(code[own], kind="stable")]
            for own, code in zip((found.get(task, none) for found in rows), codes, strict=True)
        ]
        before_codes, after_codes = (code[own] for own, code in zip(order, codes, strict=True))
        if not np.array_equal(before_codes, after_codes):
            yield OtherDocuments(task, len(before_codes), len(after_codes), _common(before_codes, after_codes))
            continue
        ids = as_floats(tables[1]["doc_id"]).astype(np.int64)[order[1]]
        found = {name: (values[0][name][order[0]], values[1][name][order[1]]) for name in columns}
        group = np.cumsum(np.diff(before_codes, prepend=before_codes[:1]) != 0)
        yield PairedDocuments(task, ids, group, found, lost, gained)


def _read(stored: StoredRecord) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(stored.samples_content()))
    columns = file.schema_arrow.names
    if absent := set(FIELDS.names) - set(columns):
        raise StoreError(f"{stored.folder / SAMPLES} lacks the column {sorted(absent)[0]}; run the cell again.")
    return file.read([name for name in columns if name not in UNUSED], use_threads=False).combine_chunks()


def _values(table: pa.Table) -> dict[str, Floats]:
    """The columns of metrics and weights, with the log-softmax of the right answer beside them."""
    metrics = [name for name in table.column_names if name not in FIELDS.names]
    return {name: as_floats(table[name]) for name in metrics} | {GOLD_LOGPROB: gold_logprobs(table)}


def _codes(tables: list[pa.Table]) -> list[Ints]:
    """For each table, a number a row that stands for the document's content."""
    hashes = [table["doc_hash"] for table in tables]
    if hashes[0].equals(hashes[1]):
        return [_encoded(one_array(hashes[0]))] * 2
    both = pa.concat_arrays([one_array(column) for column in hashes])
    return np.split(_encoded(both), [len(tables[0])])


def _common(before: Ints, after: Ints) -> int:
    """How many documents two runs share; one that occurs twice in both counts twice."""
    size = 1 + max(before.max(initial=0), after.max(initial=0))
    return int(np.minimum(np.bincount(before, minlength=size), np.bincount(after, minlength=size)).sum())


def _encoded(strings: pa.Array) -> Ints:
    return np.asarray(np.from_dlpack(strings.dictionary_encode().indices), dtype=np.int64)
