"""Actions and plans, and the CSV file of a plan.  Pure.

A plan is data: one line a rank, one cell an action. `F3` is the forward of segment 3, `B3` its
backward; with virtual stages `F3.1` is the forward on model chunk 1 of that rank. Sends and
receives between stages are not written: a stage receives right before the action that needs the
message and sends right after the action that made it. torch.distributed.pipelining prints its
schedules in the same way. Those between data-parallel ranks are: `S3>1` sends to rank 1, `R3<1`
receives from it (`S3.1>0` on model chunk 1). The file of a plan with these has a column more, `<1`
for a segment that comes from rank 1, `>1:0 2;>2:0` for one whose spans 0 and 2 rank 1 gets.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_prefix.errors import UserError
from megatron_prefix.tree import Place, Segment, Span
from megatron_prefix.tree.forest import joined_of, with_above

VERSION, VERSION_ALONE = 5, 4
"""Of files of plans whose segments cross data-parallel ranks, and of all others."""
ON_DEVICE = ("retain", "recompute_act")
POLICIES = (*ON_DEVICE, "offload", "recompute")
"""What a segment can keep between its forward and its backward; see PrefixConfig.memory. Waves keep
it on the device."""
_MAKE = "make one with `megatron-prefix plan … --csv`"
_CELL = re.compile(r"([FBSR])(\d{1,9})(?:\.(\d{1,9}))?(?:([<>])(\d{1,9}))?", re.ASCII)
_SIGNS = {"S": ">", "R": "<"}  # before the peer
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


class Action(NamedTuple):
    """One cell of a plan.

    Attributes:
        kind: "F" or "B"; "S" or "R", which send or receive a segment's payload or its gradients.
        segment: index in F-order.
        chunk: model chunk of the rank (0 without virtual stages).
        peer: the other data-parallel rank of "S" or "R"; -1 of "F" and "B".
    """

    kind: str
    segment: int
    chunk: int = 0
    peer: int = -1

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        peer = f"{_SIGNS[self.kind]}{self.peer}" if self.kind in _SIGNS else ""
        return f"{self.kind}{self.segment}{chunk}{peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of str().

        Raises:
            UserError: the text is not an action.
        """
        match = _CELL.fullmatch(text.strip())
        if not match or _SIGNS.get(match[1]) != match[4]:
            raise UserError(
                f"{_shown(text)} is not an action: write F3, B3, or F3.1 for model chunk 1; S3>1 or"
                " R3<1 to send to or receive from data-parallel rank 1"
            )
        return cls(match[1], int(match[2]), int(match[3] or 0), int(match[5] or -1))


class Transfer(NamedTuple):
    """A segment that this rank computes and another data-parallel rank reads.

    Attributes:
        segment: index in F-order.
        peer: the data-parallel rank that gets its payload.
        spans: numbers of the segment's spans that the peer gets.
    """

    segment: int
    peer: int
    spans: tuple[int, ...]


class Sent(NamedTuple):
    """What of a segment other data-parallel ranks get, each of them counted.

    Attributes:
        positions, spans: of the segment, padding included.
        copied, copied_spans: those of them that go to ranks whose spans are not neighbours.
        level: of the segment, which crosses or is received; -1: neither.
    """

    positions: int
    spans: int
    copied: int
    copied_spans: int
    level: int = -1


@dataclass(frozen=True)
class Plan:
    """What every rank of a pipeline does in one step.

    Attributes:
        segments: the step's segments in F-order.
        programs: per pipeline rank its actions in order.
        num_chunks: model chunks a rank (virtual stages), 1 without interleaving.
        policies: per segment one of POLICIES; empty: all retain.
        transfers: payloads that this data-parallel rank sends, one of each segment and peer.
        sent: what of each segment crosses, for the memory that it takes; empty: nothing. Not in a
            file.
    """

    segments: tuple[Segment, ...]
    programs: tuple[tuple[Action, ...], ...]
    num_chunks: int = 1
    policies: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    sent: tuple[Sent, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Pipeline size."""
        return len(self.programs)

    @property
    def crosses(self) -> bool:
        """Whether segments cross data-parallel ranks."""
        return bool(self.transfers) or any(one.source >= 0 for one in self.segments)

    @property
    def num_stages(self) -> int:
        """Pipeline size times virtual stages."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Stage that model chunk `chunk` of a pipeline rank holds, counted from the embedding."""
        return chunk * self.num_ranks + rank

    def actions_of(self, rank: int, chunk: int) -> list[tuple[str, int]]:
        """("F" or "B", segment) of one model chunk of a rank, in order."""
        return [(kind, index) for kind, index, on, _ in self.programs[rank] if on == chunk]

    def policy(self, index: int) -> str:
        """What a segment keeps between its forward and its backward."""
        return self.policies[index] if self.policies else "retain"

    def to_csv(self) -> str:
        """The plan as CSV: a header, the table of segments, one line of actions a rank."""
        out = io.StringIO()
        write = csv.writer(out, lineterminator="\n").writerow
        write(_HEADER)
        version = VERSION if self.crosses else VERSION_ALONE
        write([_HEADER[0], version, self.num_ranks, self.num_chunks])
        write(_columns(version))
        for index, segment in enumerate(self.segments):
            cells = segment_cells(index, segment)
            trained = "" if segment.trained is None else segment.trained
            across = [self._across(index)] if self.crosses else []
            write([*cells[:2], self.policy(index), trained, *across, *cells[2:]])
        for rank, program in enumerate(self.programs):
            write([f"rank {rank}", *map(str, program)])
        return out.getvalue()

    def _across(self, index: int) -> str:
        source, sent = self.segments[index].source, []
        for one in self.transfers:
            if one.segment == index:
                sent.append(f">{one.peer}:{' '.join(map(str, one.spans))}")
        return f"<{source}" if source >= 0 else ";".join(sent)

    @classmethod
    def from_csv(cls, text: str, name: str = "plan") -> Plan:
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
        with contextlib.suppress(IndexError):  # they are no forest, see `read_plan`
            segments = tuple(with_above(segments))
        return cls(segments, programs, chunks, policies, tuple(itertools.chain(*transfers)))


def _columns(version: int) -> list[str]:
    return [*_COLUMNS[:4], *([_ACROSS] if version == VERSION else []), *_COLUMNS[4:]]


def _sizes(line: Sequence[str], name: str) -> tuple[int, int, int]:
    try:
        version, ranks, chunks = map(_number, line[1:])
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


def _number(text: str) -> int:
    """A whole number of at most nine digits: nothing in a plan is larger."""
    if not _NUMBER.fullmatch(text):
        raise UserError(f"{_shown(text)} is not a whole number below 10^9")
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
    if _number(index) != number or not spans:
        raise UserError(f"segment {index}: number from 0, with spans")
    flags = {text: key for key, text in _KINDS.items()}.get(kind)
    if flags is None:
        raise UserError(f"kind {_shown(kind)}: give one of {', '.join(_KINDS.values())}")
    known = POLICIES if flags[0] else ON_DEVICE
    if policy not in known:
        raise UserError(f"policy {_shown(policy)}: {kind} can have {' or '.join(known)}")
    made = tuple(map(_span_from, spans))
    segment = Segment(made, *flags, joined=joined_of(number, made))
    if trained and not 0 <= _number(trained) <= segment.padded_length * flags[1]:
        raise UserError(
            f"{_shown(trained)} trained positions: give at most as many as the spans have, and 0"
            " without loss"
        )
    source, transfers = _across_from(number, across)
    segment = segment._replace(trained=_number(trained) if trained else None, source=source)
    return segment, policy, transfers


def _across_from(segment: int, text: str) -> tuple[int, list[Transfer]]:
    """The rank that a segment comes from, or the ranks that get it."""
    if text.startswith("<"):
        source = _number(text[1:])
        if source < 0:
            raise UserError(f"{_shown(text)} is not a data-parallel rank")
        return source, []
    transfers = []
    for part in text.split(";") if text else ():
        match = _TRANSFER.fullmatch(part)
        if not match:
            raise UserError(
                f"{_shown(part)} says no ranks: write <1 for a segment that comes from rank 1, or"
                " >1:0 2;>2:0 for one whose spans 0 and 2 go to rank 1, and span 0 to rank 2"
            )
        transfers.append(Transfer(segment, int(match[1]), tuple(map(int, match[2].split()))))
    return -1, transfers


def _span_from(text: str) -> Span:
    match = _SPAN.fullmatch(text)
    if not match:
        raise UserError(
            f"{_shown(text)} is not a span: write start+length/padded:rollouts, and <segment.span"
            " of its parent if it has one, below 10^9 each"
        )
    start, length, padded = (int(match[k]) for k in (1, 2, 3))
    parent = Place(int(match[5]), int(match[6])) if match[5] else None
    return Span(start, length, padded, tuple(map(int, match[4].split())), parent)


def _program_from(number: int, line: Sequence[str]) -> tuple[Action, ...]:
    if line[0] != f"rank {number}":
        raise UserError(f"expected 'rank {number}', found {_shown(line[0])}")
    return tuple(Action.parse(cell) for cell in line[1:])


def _shown(text: str) -> str:
    """A cell for a message, shortened."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def policies(segments: Sequence[Segment], memory: str) -> tuple[str, ...]:
    """The policy of every segment of a step, or () where all retain.

    Args:
        segments: of the step.
        memory: the policy of inner segments, and with "recompute_act" of waves. Else these retain:
            their backward follows their forward; and so do segments of other ranks.
            "auto" retains here; see memory_policy.py.
    """
    if memory in ("retain", "auto"):
        return ()
    waves = memory in ON_DEVICE
    return tuple(
        memory if segment.source < 0 and (segment.waits or waves) else "retain"
        for segment in segments
    )
