"""The CSV file of a plan: a header, a table of segments, and a line of actions a rank.  Pure.

Where segments cross data-parallel ranks the table has a column more: `<1` for a segment that comes
from rank 1, `>1:0 2;>2:0` for one whose spans 0 and 2 rank 1 gets, and whose span 0 rank 2.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import ON_DEVICE, POLICIES, SIGNS, Action, Plan, Transfer
from megatron_prefix.tree import Place, Segment, Span
from megatron_prefix.tree.forest import joined_of, with_above

VERSION, VERSION_ALONE = 5, 4
"""Of files of plans whose segments cross data-parallel ranks, and of all others."""
_MAKE = "make one with `megatron-prefix plan … --csv`"
_CELL = re.compile(r"([FBSR])(\d{1,9})(?:\.(\d{1,9}))?(?:([<>])(\d{1,9}))?", re.ASCII)
_SPAN = re.compile(
    r"(\d{1,9})\+(\d{1,9})/(\d{1,9}):((?:\d{1,9}(?: \d{1,9})*)?)(?:<(\d{1,9})\.(\d{1,9}))?",
    re.ASCII,
)
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)
_HEADER = ["megatron_prefix plan", "version", "ranks", "chunks"]
_COLUMNS = [
    "segment", "kind", "policy", "trained",
    "spans (start+length/padded:rollouts<parent segment.span)",
]  # fmt: skip
_ACROSS = "ranks (<source or >peer:its spans)"  # after the trained positions
_TRANSFER = re.compile(r">(\d{1,9}):(\d{1,9}(?: \d{1,9})*)", re.ASCII)
# How a segment's flags are written in the table.
_KINDS = {
    (inner, scored): ("inner" if inner else "wave") + ("+scored" if scored else "")
    for inner in (True, False)
    for scored in (True, False)
}


def to_csv(plan: Plan) -> str:
    """The plan as CSV: a header, the table of segments, one line of actions a rank."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(_HEADER)
    version = VERSION if plan.crosses else VERSION_ALONE
    write([_HEADER[0], version, plan.num_ranks, plan.num_chunks])
    write(_columns(version))
    for index, segment in enumerate(plan.segments):
        cells = segment_cells(index, segment)
        trained = "" if segment.trained is None else segment.trained
        across = [_crossing_columns(plan, index)] if plan.crosses else []
        write([*cells[:2], plan.policy(index), trained, *across, *cells[2:]])
    for rank, program in enumerate(plan.programs):
        write([f"rank {rank}", *map(str, program)])
    return out.getvalue()


def _crossing_columns(plan: Plan, index: int) -> str:
    source, transfers = plan.segments[index].source, []
    for transfer in plan.transfers:
        if transfer.segment == index:
            transfers.append(f">{transfer.peer}:{' '.join(map(str, transfer.spans))}")
    return f"<{source}" if source >= 0 else ";".join(transfers)


def from_csv(text: str, name: str = "plan") -> Plan:
    """Reads what `to_csv` wrote; errors call the file `name`.

    Raises:
        UserError: not a plan of this version; the line and the cell are named.
    """
    try:
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
    except csv.Error as error:
        raise UserError(f"{name}: not a plan: it is no CSV ({error})") from None
    if len(lines) < 3 or lines[0] != _HEADER:
        raise UserError(f"{name}: not a plan: {_MAKE}")
    version, ranks, chunks = _sizes(lines[1], name)
    if lines[2] != _columns(version):
        raise UserError(f"{name}:3: not the columns of a plan: {_MAKE}")
    body = lines[3:]
    if len(body) <= ranks:
        raise UserError(f"{name}: {len(body)} lines after the header, {ranks} ranks announced")
    num_segments = len(body) - ranks
    if num_segments * chunks > sum(map(len, body[-ranks:])):
        raise UserError(
            f"{name}:2: {num_segments} segments on {chunks} model chunks a rank are more than"
            " the file has actions; correct the number of chunks"
        )
    crosses = version == VERSION
    parse = functools.partial(_segment_from, crosses=crosses)
    rows = list(_read_lines(body[:-ranks], parse, name, 4))
    programs = tuple(_read_lines(body[-ranks:], _program_from, name, 4 + num_segments))
    segments, policies, transfers = zip(*rows, strict=True) if rows else ((), (), ())
    if set(policies) == {POLICIES[0]}:
        policies = ()
    with contextlib.suppress(IndexError):  # they are no forest, see `check_segments`
        segments = tuple(with_above(segments))
    return Plan(segments, programs, chunks, policies, tuple(itertools.chain(*transfers)))


def _columns(version: int) -> list[str]:
    return [*_COLUMNS[:4], *([_ACROSS] if version == VERSION else []), *_COLUMNS[4:]]


def _sizes(line: Sequence[str], name: str) -> tuple[int, int, int]:
    try:
        version, ranks, chunks = map(_number_in, line[1:])
    except ValueError:
        raise UserError(f"{name}:2: version, ranks and chunks must be whole numbers") from None
    if version not in (VERSION, VERSION_ALONE):
        raise UserError(
            f"{name}:2: a plan of version {version}, and this release reads versions"
            f" {VERSION_ALONE} and {VERSION}: {_MAKE} from the same rollouts"
        )
    if ranks < 1 or chunks < 1:
        raise UserError(f"{name}:2: ranks {ranks}, chunks {chunks}: give at least one of each")
    return version, ranks, chunks


def _number_in(text: str) -> int:
    """A whole number of at most nine digits: nothing in a plan is larger."""
    if not _NUMBER.fullmatch(text):
        raise UserError(f"{_printed(text)} is not a whole number below 10^9")
    return int(text)


def _read_lines(
    lines: Sequence[list[str]], parse: Callable[[int, list[str]], Any], name: str, first: int
) -> Iterator[Any]:
    for number, line in enumerate(lines):
        try:
            yield parse(number, line)
        except (UserError, ValueError, IndexError) as error:
            raise UserError(f"{name}:{first + number}: {error}") from None


def segment_cells(index: int, segment: Segment) -> list[str]:
    """A segment as it stands in the table, without its policy and its trained positions."""
    return [
        str(index), _KINDS[segment.inner, segment.scored], *map(_span_text, segment.spans)
    ]  # fmt: skip


def _span_text(span: Span) -> str:
    members = " ".join(map(str, span.rollouts))
    above = "" if span.parent is None else f"<{span.parent.segment}.{span.parent.number}"
    return f"{span.start}+{span.length}/{span.padded}:{members}{above}"


def _segment_from(
    number: int, line: Sequence[str], crosses: bool
) -> tuple[Segment, str, list[Transfer]]:
    """A segment, its policy, and the ranks that get it."""
    index, kind, policy, trained, across, *spans = line if crosses else [*line[:4], "", *line[4:]]
    if _number_in(index) != number or not spans:
        raise UserError(f"segment {index}: number from 0, with spans")
    flags = {text: key for key, text in _KINDS.items()}.get(kind)
    if flags is None:
        raise UserError(f"kind {_printed(kind)}: give one of {', '.join(_KINDS.values())}")
    policies = POLICIES if flags[0] else ON_DEVICE
    if policy not in policies:
        raise UserError(f"policy {_printed(policy)}: {kind} can have {' or '.join(policies)}")
    created = tuple(map(_span_from, spans))
    segment = Segment(created, *flags, joined=joined_of(number, created))
    if trained and not 0 <= _number_in(trained) <= segment.padded_length * flags[1]:
        raise UserError(
            f"{_printed(trained)} trained positions: give at most as many as the spans have, and 0"
            " without loss"
        )
    source, transfers = _across_from(number, across)
    segment = segment._replace(trained=_number_in(trained) if trained else None, source=source)
    return segment, policy, transfers


def _across_from(segment: int, text: str) -> tuple[int, list[Transfer]]:
    """The rank that a segment comes from, or the ranks that get it."""
    if text.startswith("<"):
        source = _number_in(text[1:])
        if source < 0:
            raise UserError(f"{_printed(text)} is not a data-parallel rank")
        return source, []
    transfers = []
    for part in text.split(";") if text else ():
        match = _TRANSFER.fullmatch(part)
        if not match:
            raise UserError(
                f"{_printed(part)} says no ranks: write <1 for a segment that comes from rank 1, or"
                " >1:0 2;>2:0 for one whose spans 0 and 2 go to rank 1, and span 0 to rank 2"
            )
        transfers.append(Transfer(segment, int(match[1]), tuple(map(int, match[2].split()))))
    return -1, transfers


def _span_from(text: str) -> Span:
    match = _SPAN.fullmatch(text)
    if not match:
        raise UserError(
            f"{_printed(text)} is not a span: write start+length/padded:rollouts, and <segment.span"
            " of its parent if it has one, below 10^9 each"
        )
    start, length, padded = (int(match[k]) for k in (1, 2, 3))
    parent = Place(int(match[5]), int(match[6])) if match[5] else None
    return Span(start, length, padded, tuple(map(int, match[4].split())), parent)


def _program_from(number: int, line: Sequence[str]) -> tuple[Action, ...]:
    if line[0] != f"rank {number}":
        raise UserError(f"expected 'rank {number}', found {_printed(line[0])}")
    return tuple(parse_action(cell) for cell in line[1:])


def _printed(text: str) -> str:
    """A cell for a message, shortened."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def parse_action(text: str) -> Action:
    """The inverse of str().

    Raises:
        UserError: the text is not an action.
    """
    match = _CELL.fullmatch(text.strip())
    if not match or SIGNS.get(match[1]) != match[4]:
        raise UserError(
            f"{_printed(text)} is not an action: write F3, B3, or F3.1 for model chunk 1; S3>1 or"
            " R3<1 to send to or receive from data-parallel rank 1"
        )
    return Action(match[1], int(match[2]), int(match[3] or 0), int(match[5] or -1))
