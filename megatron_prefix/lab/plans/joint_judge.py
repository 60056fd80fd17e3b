"""Whether the ranks of a job end when each does one thing after another.  Pure.

The strictest way to run them: a rank goes on when all that it has issued is done, so a message, a
batch of messages or a meeting holds up all that follows it, as kernels on a GPU may do whose
streams share one queue (plan/timetable.py).  Ranks that end so end anyhow.  Gradients hold up a
rank in any case: a host may wait for all that its device has begun.

Reasons why not, in the order in which they are looked for:

- *order*: an action, or what leaves, is before something that it needs on its own rank;
- *window*: a rank has more received positions at a time than it may;
- *starvation*: a rank waits for what never comes, as the other end is missing;
- *order*: the two ends of a message are not of one message, so that a rank takes one as another;
- *deadlock*: ranks wait in a circle.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence

from megatron_prefix.features.experts.sums import progress
from megatron_prefix.lab.plans.joint_program import (
    Batch,
    End,
    Meet,
    Pipeline,
    Programs,
    Rank,
    Step,
)
from megatron_prefix.plan.actions import Action


class How(enum.Enum):
    """What holds a rank up.

    ONE_BY_ONE: whatever it has begun, and it begins one message after another.
    HOLDING: whatever it has begun; messages of a batch begin at once.
    ONE_QUEUE: what is at the head of a device's one queue (CUDA_DEVICE_MAX_CONNECTIONS=1): an
        action that needs what has not come, or a message whose stream has not ended another.
    """

    ONE_BY_ONE = enum.auto()
    HOLDING = enum.auto()
    ONE_QUEUE = enum.auto()


def judged(
    pipelines: Sequence[Pipeline],
    programs: Programs,
    windows: Sequence[float] | None = None,
    how: How = How.HOLDING,
) -> str:
    """What is wrong with the programs of a job; empty: they end.

    Args:
        pipelines: one a data-parallel rank, of the programs.
        programs: of `joint_programs`.
        windows: received positions that a data-parallel rank may have at a time on every stage; one
            on one of v model chunks counts 1/v.  None: all that it gets.
        how: see How.
    """
    for rank, program in programs.items():
        if fault := next(_faults(pipelines[rank.data], rank, program), ""):
            return f"order: {rank}: {fault}"
    for rank, program in programs.items():
        one = pipelines[rank.data]
        received = (s.padded_length for s in one.plan.segments if s.source >= 0)
        window = float(sum(received)) if windows is None else windows[rank.data]
        if (peak := peak_received(one, program)) > window:
            return f"window: {rank} has {peak:g} received positions at a time, of {window:g}"
    return _starved(programs) or _Play(pipelines, programs, how).run()


def peak_received(pipeline: Pipeline, program: Sequence[Step]) -> float:
    """The most received positions at a time: from where a payload begins to come until its
    gradients have left."""
    now = most = 0.0
    for step in program:
        for end in step.ends if isinstance(step, Batch) else ():
            segment = pipeline.plan.segments[end.segment]
            if end.channel == "across" and segment.source >= 0:
                positions = segment.padded_length / pipeline.plan.num_chunks
                now += positions if end.kind == "R" else -positions
        most = max(most, now)
    return most


# One rank ----------------------------------------------------------------------------------------

Key = Action | tuple[str, str, int, int, Rank]
"""What a rank does: an action, or kind, channel, segment, chunk and peer of an end."""


def _key(end: End) -> Key:
    return end.kind, end.channel, end.segment, end.chunk, end.peer


def _told(key: Key) -> str:
    if isinstance(key, Action):
        return str(key)
    kind, channel, segment, chunk, peer = key
    return str(End(kind, peer, channel, None, segment, chunk))


def _faults(pipeline: Pipeline, rank: Rank, program: Sequence[Step]) -> Iterator[str]:
    """What a rank does before something that it needs, or twice; actions that it never runs."""
    needs = _Needs(pipeline, rank).all()
    done: set[Key] = set()
    for step in program:
        keys: list[Key] = [step] if isinstance(step, Action) else []
        keys += map(_key, step.ends) if isinstance(step, Batch) else []
        for key in keys:
            if key not in needs:
                yield f"{_told(key)} does not exist"
            elif key in done:
                yield f"{_told(key)} a second time"
            else:
                missing = (one for one in needs[key] if one not in done)
                yield from (f"{_told(key)} before {_told(one)}" for one in missing)
        done.update(keys)
    for key in needs:
        if isinstance(key, Action) and key not in done:
            yield f"never {key}"


class _Needs:
    """What every action and every end of a message needs on its own rank."""

    def __init__(self, pipeline: Pipeline, rank: Rank) -> None:
        self.pipeline, self.rank, self.plan = pipeline, rank, pipeline.plan
        self.segments = pipeline.plan.segments
        self.peers = {
            one.segment: [Rank(peer, rank.stage) for peer, _ in one.peers]
            for one in pipeline.forest.exchanges
        }
        self.readers: list[list[int]] = [[] for _ in self.segments]
        for index, segment in enumerate(self.segments):
            for parent in segment.parents:
                self.readers[parent].append(index)

    def all(self) -> dict[Key, list[Key]]:
        """By action and end."""
        found: dict[Key, list[Key]] = {}
        for index, segment in enumerate(self.segments):
            for chunk in range(self.plan.num_chunks):
                peers = self.peers.get(index, [])
                if segment.source < 0:
                    found |= self._computed(index, chunk, peers)
                elif peers:
                    payload = ("R", "across", index, chunk, peers[0])
                    found[payload] = []
                    found["S", "across", index, chunk, peers[0]] = [
                        payload, *self._read(index, chunk)
                    ]  # fmt: skip
        return found

    def _computed(self, index: int, chunk: int, peers: Sequence[Rank]) -> dict[Key, list[Key]]:
        forward, backward = Action("F", index, chunk), Action("B", index, chunk)
        found: dict[Key, list[Key]] = {
            forward: self._above(index, chunk),
            backward: [forward, *self._read(index, chunk)],
        }
        for peer in peers:
            sent: Key = ("S", "across", index, chunk, peer)
            back: Key = ("R", "across", index, chunk, peer)
            found[sent], found[back] = [forward], [sent]
            found[backward].append(back)
        stage, num = self.plan.stage(self.rank.stage, chunk), self.plan.num_ranks
        before, after = (
            self.rank._replace(stage=(self.rank.stage + step) % num) for step in (-1, 1)
        )
        if stage:
            found[forward].append(("R", "F", index, chunk, before))
            found["R", "F", index, chunk, before] = []
            found["S", "B", index, chunk, before] = [backward]
        if stage < self.plan.num_stages - 1:
            found[backward].append(("R", "B", index, chunk, after))
            found["R", "B", index, chunk, after] = []
            found["S", "F", index, chunk, after] = [forward]
        else:
            last = self.pipeline.ready_after[index]
            losses = (self._first(one, chunk) for one in range(last + 1))
            found[backward] += [one for one in losses if one is not None]
        return found

    def _first(self, index: int, chunk: int) -> Key | None:
        """From when on a segment can be read; None of one that only others have."""
        if self.segments[index].source < 0:
            return Action("F", index, chunk)
        peers = self.peers.get(index, [])
        return ("R", "across", index, chunk, peers[0]) if peers else None

    def _above(self, index: int, chunk: int) -> list[Key]:
        """What a segment reads, up to the first computed one on each path."""
        found = set()
        for span in self.segments[index].spans:
            above = span.parent
            while above is not None and above.segment != index:
                found.add(self._first(above.segment, chunk))
                segment = self.segments[above.segment]
                above = segment.spans[above.number].parent if segment.source >= 0 else None
        return [one for one in found if one is not None]

    def _read(self, index: int, chunk: int) -> list[Key]:
        """The ends of all that read a segment."""
        found: list[Key] = []
        for reader in self.readers[index]:
            peers = self.peers.get(reader, [])
            if self.segments[reader].source < 0:
                found.append(Action("B", reader, chunk))
            elif peers:
                found.append(("S", "across", reader, chunk, peers[0]))
        return found


# All of them -------------------------------------------------------------------------------------


def _starved(programs: Programs) -> str:
    """Which end of a message is alone, or who misses a meeting."""
    ends: dict[bool, Counter[tuple[str, Rank, Rank, Hashable]]] = {
        True: Counter(),
        False: Counter(),
    }
    meetings: dict[Rank, Counter[Meet]] = {rank: Counter() for rank in programs}
    for rank, program in programs.items():
        for step in program:
            for end in step.ends if isinstance(step, Batch) else ():
                sends = end.kind == "S"
                link = (rank, end.peer) if sends else (end.peer, rank)
                ends[sends][end.channel, link[0], link[1], end.what] += 1
            if isinstance(step, Meet):
                meetings[rank][step] += 1
    for (channel, sender, receiver, what), _ in (ends[True] - ends[False]).items():
        return f"starvation: {sender} sends {channel} {what}, which {receiver} never takes"
    for (channel, sender, receiver, what), _ in (ends[False] - ends[True]).items():
        return f"starvation: {receiver} waits for {channel} {what}, which {sender} never sends"
    for rank, mine in meetings.items():
        for meeting in mine:
            for other in meeting.ranks:
                if meetings[other][meeting] != mine[meeting]:
                    text = f"{meeting.channel} {meeting.what}"
                    return f"starvation: {rank} and {other} do not meet equally often in {text}"
    return ""


class _Play:
    """All ranks, each as far as it has issued.

    Attributes:
        at: per rank the place of the step that it comes to next.
        begun: per rank the channels whose last message, batch or meeting has not ended, and how
            many ends of it are left.
        ended: per rank the ends that have crossed, and the sums that have been made.
        open: per channel, sender and receiver the ends of either side that wait.
        come: per channel and ranks those that wait in a meeting, and in which.
    """

    def __init__(self, pipelines: Sequence[Pipeline], programs: Programs, how: How) -> None:
        self.how, self.programs = how, programs
        if how is How.ONE_BY_ONE:
            self.programs = {rank: [*_apart(program)] for rank, program in programs.items()}
        self.needs = {rank: _Needs(pipelines[rank.data], rank).all() for rank in programs}
        self.sums = {rank: _sums(pipelines[rank.data], rank) for rank in programs}
        self.at = dict.fromkeys(programs, 0)
        self.begun: dict[Rank, Counter[str]] = {rank: Counter() for rank in programs}
        self.ended: dict[Rank, set[Hashable]] = {rank: set() for rank in programs}
        self.open: dict[tuple[str, Rank, Rank], tuple[deque[End], deque[End]]] = {}
        self.come: dict[tuple[str, tuple[Rank, ...]], dict[Rank, Hashable]] = {}
        self.ready = deque(programs)

    def run(self) -> str:
        """Until nobody can go on."""
        while self.ready:
            rank = self.ready.popleft()
            program = self.programs[rank]
            while self.at[rank] < len(program) and not self._held(rank):
                step = program[self.at[rank]]
                self.at[rank] += 1
                fault = ""
                if isinstance(step, Batch):
                    fault = self._begin(rank, step)
                elif isinstance(step, Meet):
                    fault = self._meet(rank, step)
                if fault:
                    return fault
        stuck = [rank for rank in self.programs if self._waits_for(rank) is not None]
        return self._circle(stuck[0]) if stuck else ""

    def _held(self, rank: Rank) -> bool:
        """Whether a rank's next step has to wait for something that it has begun."""
        begun, step = self.begun[rank], self.programs[rank][self.at[rank]]
        if not begun.total():
            return False
        if self.how is not How.ONE_QUEUE or begun["experts"] or begun["gradients"]:
            return True
        if not isinstance(step, Action):
            channels = {step.channel} if isinstance(step, Meet) else {_stream(step.ends[0])}
            if any(begun[one] for one in channels):
                return True
        return any(one not in self.ended[rank] for one in self._awaited(rank, step))

    def _awaited(self, rank: Rank, step: Step) -> Iterator[Hashable]:
        """The ends, and the sums, that a step waits for."""
        needs = self.needs[rank]
        if isinstance(step, Meet):
            return
        for key in [step] if isinstance(step, Action) else map(_key, step.ends):
            for one in needs[key]:
                if not isinstance(one, Action) and one[0] == "R":
                    yield one
        if isinstance(step, Action) and step.kind == "B" and self._counts(rank):
            yield from (("counts", number) for number in range(self.sums[rank][step]))

    def _counts(self, rank: Rank) -> bool:
        return any(
            isinstance(step, Meet) and step.channel == "counts" for step in self.programs[rank]
        )

    def _begin(self, rank: Rank, batch: Batch) -> str:
        self.begun[rank][_stream(batch.ends[0])] += len(batch.ends)
        for end in batch.ends:
            sends = end.kind == "S"
            link = (rank, end.peer) if sends else (end.peer, rank)
            sides = self.open.setdefault((end.channel, link[0], link[1]), (deque(), deque()))
            sides[not sends].append(end)
            if sides[0] and sides[1]:
                sent, got = sides[0].popleft(), sides[1].popleft()
                if sent.what != got.what:
                    return f"order: {link[1]} takes {got} of {link[0]}, which sends {sent} there"
                for one, crossed in zip(link, (sent, got), strict=True):
                    self.begun[one][_stream(crossed)] -= 1
                    self.ended[one].add(_key(crossed))
                    self.ready.append(one)
        return ""

    def _meet(self, rank: Rank, meeting: Meet) -> str:
        self.begun[rank][meeting.channel] += 1
        come = self.come.setdefault((meeting.channel, meeting.ranks), {})
        come[rank] = meeting.what
        if len({*come.values()}) > 1:
            text = ", ".join(f"{one} in {what}" for one, what in come.items())
            return f"order: ranks meet in different {meeting.channel}: {text}"
        if len(come) == len(meeting.ranks):
            for one in come:
                self.begun[one][meeting.channel] -= 1
                self.ended[one].add((meeting.channel, meeting.what))
                self.ready.append(one)
            come.clear()
        return ""

    def _waits_for(self, rank: Rank) -> Rank | None:
        """Who has the other end of what a rank has begun; None if all of it has ended."""
        for ranks, come in ((key[1], come) for key, come in self.come.items()):
            if rank in come:
                return next(one for one in ranks if one not in come)
        for (_, sender, receiver), sides in self.open.items():
            if (rank == sender and sides[0]) or (rank == receiver and sides[1]):
                return receiver if rank == sender else sender
        return None

    def _circle(self, rank: Rank) -> str:
        """From one that waits to the one it waits for, until some of them are a circle."""
        path: list[Rank] = []
        following: Rank | None = rank
        while following not in path and following is not None:
            path.append(following)
            following = self._waits_for(following)
        if following is None:
            return (
                f"starvation: {path[-1]} waits for what never comes, at place {self.at[path[-1]]}"
            )
        waits = ", ".join(
            f"{one}, place {self.at[one]}, for {self._waits_for(one)}"
            for one in path[path.index(following) :]
        )
        return f"deadlock: {waits} wait in a circle"


def _stream(end: End) -> str:
    """Of the messages that follow one another on a rank."""
    return f"{end.channel}{end.kind}" if end.channel != "across" else end.channel


def _sums(pipeline: Pipeline, rank: Rank) -> dict[Action, int]:
    """By action of a rank how many sums it waits for."""
    steps = progress(pipeline.plan, rank.stage, pipeline.microbatch_of)
    program = pipeline.plan.programs[rank.stage]
    return {action: needed for action, (_, needed) in zip(program, steps, strict=True)}


def _apart(program: Sequence[Step]) -> Iterator[Step]:
    """With batches of one message each."""
    for step in program:
        if isinstance(step, Batch):
            yield from (Batch((end,)) for end in step.ends)
        else:
            yield step
