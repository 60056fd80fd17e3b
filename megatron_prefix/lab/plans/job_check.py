"""The rules that plans of several data-parallel ranks keep when they share prompts.  Pure.

A segment that several ranks read runs on one of them, which sends its payload to the others (`S`
there, `R` here) and gets their gradients back (`R` there, `S` here). On a rank that computes it,
an `S` to each peer follows `F`, and an `R` from each comes before `B`; on a rank that receives it,
`R` stands for `F` and `S` for `B`.

Plans can run if every rank keeps the order of its own actions, if both ends of all messages are
there, fit and come in one order, and if all ends even where each `S` and `R` blocks its rank until
the other end is reached. That is the strictest way to run it: plan/timetable.py says when devices
do.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

from megatron_prefix.plan.actions import Action, Plan, Transfer
from megatron_prefix.plan.error import Cell, PlanError
from megatron_prefix.tree import Segment

End = tuple[int, Action]
"""A rank and its `S` or `R`: one of the two ends of a message."""


def first_action(index: int, segment: Segment) -> Action:
    """From when on a segment can be read."""
    return Action("R", index, 0, segment.source) if segment.source >= 0 else Action("F", index)


def last_action(index: int, segment: Segment) -> Action:
    """What ends a segment, after all that read it."""
    return Action("S", index, 0, segment.source) if segment.source >= 0 else Action("B", index)


def _send(transfer: Transfer) -> Action:
    return Action("S", transfer.segment, 0, transfer.peer)


def _needs(plan: Plan) -> dict[Action, list[Action]]:
    """All actions of a rank, each with those that come before it."""
    segments = plan.segments
    first, last = (
        [*itertools.starmap(end, enumerate(segments))] for end in (first_action, last_action)
    )
    needs: dict[Action, list[Action]] = {}
    for index, segment in enumerate(segments):
        needs[first[index]] = [] if segment.source >= 0 else [first[i] for i in _read(plan, index)]
        needs[last[index]] = [first[index]]
    for transfer in plan.transfers:
        send = _send(transfer)
        needs[send] = [first[transfer.segment]]
        needs[send._replace(kind="R")] = [send]
        needs[last[transfer.segment]].append(send._replace(kind="R"))
    for index, segment in enumerate(segments):
        for parent in segment.parents:
            needs[last[parent]].append(last[index])
    return needs


def _read(plan: Plan, index: int) -> list[int]:
    """Segments that a forward reads, up to the first computed one on each path.

    The forward of a computed one has waited for what is above it; an `R` waits for nothing.
    """
    found = set()
    for span in plan.segments[index].spans:
        above = span.parent
        while above is not None:
            found.add(above.segment)
            segment = plan.segments[above.segment]
            above = segment.spans[above.number].parent if segment.source >= 0 else None
    return sorted(found)


def _spans(plan: Plan, index: int, numbers: Sequence[int] | None = None) -> str:
    """Spans of a segment as both ends of a message know them: start+length/padded."""
    spans = plan.segments[index].spans
    chosen = spans if numbers is None else [spans[number] for number in numbers]
    return " ".join(f"{span.start}+{span.length}/{span.padded}" for span in chosen)


class Job:
    """The programs of all ranks, and what they must keep.

    Args:
        plans: of one stage each; their segments are forests as `tree.build` makes them.

    Raises:
        PlanError: segments or transfers that do not exist.

    Attributes:
        programs: one a rank; with pipelines it would be one a rank and stage.
        needs: per rank all of its actions, each with those that come before it.
        places: per rank the place of every action.
        other: of each end of a message the other one; filled by `pair`.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans
        self.programs = [plan.programs[0] for plan in plans]
        for rank in range(len(plans)):
            self._check_tables(rank)
        self.needs = [_needs(plan) for plan in plans]
        self.places: list[dict[Action, int]] = [{} for _ in plans]
        self.other: dict[End, End] = {}

    def _check_tables(self, rank: int) -> None:
        for fault in self._table_faults(self.plans[rank], {*range(len(self.plans))} - {rank}):
            raise self._refusal(f"rank {rank}: {fault}", [])

    def _table_faults(self, plan: Plan, peers: set[int]) -> Iterator[str]:
        """Segments and transfers that name what does not exist."""
        segments = plan.segments
        for index, one in enumerate(segments):
            source = one.source
            if source not in peers | {-1}:
                yield f"segment {index} comes from rank {source}, which is not another rank"
            elif source >= 0 and not one.inner:
                yield f"segment {index} is received: it must be inner"
        counts = Counter(one[:2] for one in plan.transfers)
        for index, peer, numbers in plan.transfers:
            what = f"segment {index} goes to rank {peer}"
            if not 0 <= index < len(segments) or segments[index].source >= 0:
                yield f"{what}, and is not computed here"
                continue
            if not segments[index].inner:
                yield f"{what}, and is not inner"
            if peer not in peers:
                yield f"{what}, which is not another rank"
            if counts[index, peer] > 1:
                yield f"{what} twice"
            known = range(len(segments[index].spans))
            if not numbers or len({*known} & {*numbers}) < len(numbers):
                yield f"{what} with spans {numbers}: give some of {len(known)}, each once"

    def check_program(self, rank: int, ready_after: Sequence[int] | None) -> None:
        """A rank's actions are there once, each after what it needs."""
        segments, needs, places = self.plans[rank].segments, self.needs[rank], self.places[rank]
        reached = 0  # all forwards before this one have run
        for place, action in enumerate(self.programs[rank]):
            fault = self._fault_of(action, needs, places)
            if not fault and action.kind == "B" and ready_after is not None:
                last = ready_after[action.segment]
                if last >= reached:
                    fault = f"needs a loss that takes all forwards up to F{last}"
            if fault:
                raise self._fault(rank, action, fault, place)
            places[action] = place
            while reached < len(segments) and (
                segments[reached].source >= 0 or Action("F", reached) in places
            ):
                reached += 1
        for action in needs:
            if action not in places:
                end = (rank, len(self.programs[rank]))
                raise self._refusal(f"rank {rank} never runs {action}", [end])

    @staticmethod
    def _fault_of(
        action: Action, needs: dict[Action, list[Action]], places: dict[Action, int]
    ) -> str:
        """What is wrong with an action after those that have a place."""
        if action not in needs:
            return "does not exist in the segments and transfers of this rank"
        if action in places:
            return "runs a second time"
        missing = next((one for one in needs[action] if one not in places), None)
        return f"runs before {missing}" if missing else ""

    def pair(self) -> None:
        """Finds the two ends of each message, and checks that links have one order."""
        links = [*itertools.permutations(range(len(self.plans)), 2)]
        for sender, receiver in links:
            self._pair_transfers(sender, receiver)
        for sender, receiver in links:
            self._check_link(sender, receiver)

    def _pair_transfers(self, sender: int, receiver: int) -> None:
        sent = [one for one in self.plans[sender].transfers if one.peer == receiver]
        segments = enumerate(self.plans[receiver].segments)
        received = [index for index, segment in segments if segment.source == sender]
        for transfer, index in itertools.zip_longest(sent, received):
            if index is None:
                text = f"sends what rank {receiver} does not receive"
                raise self._fault(sender, _send(transfer), text)
            payload = Action("R", index, 0, sender)
            if transfer is None:
                text = f"receives what rank {sender} does not send"
                raise self._fault(receiver, payload, text)
            send = _send(transfer)
            have = _spans(self.plans[sender], transfer.segment, transfer.spans)
            want = _spans(self.plans[receiver], index)
            if have != want:
                text = f"takes spans {want}, and {send} of rank {sender} has {have}"
                raise self._fault(receiver, payload, text)
            back = (send._replace(kind="R"), payload._replace(kind="S"))
            for mine, theirs in ((send, payload), back):
                self.other[sender, mine] = receiver, theirs
                self.other[receiver, theirs] = sender, mine

    def _check_link(self, sender: int, receiver: int) -> None:
        """Payloads and gradients of a link arrive in the order in which they leave."""
        sent = [one for one in self.programs[sender] if one[::3] == ("S", receiver)]
        received = [one for one in self.programs[receiver] if one[::3] == ("R", sender)]
        for number, (send, receive) in enumerate(zip(sent, received, strict=True)):
            if self.other[sender, send] != (receiver, receive):
                text = f"takes message {number} from rank {sender}, which sends {send} there"
                raise self._fault(receiver, receive, text)

    def meet(self) -> None:
        """Plays the job where each rank does one thing after another, and messages block."""
        programs, at = self.programs, [0] * len(self.programs)
        ready = deque(range(len(programs)))
        while ready:
            rank = ready.popleft()
            while at[rank] < len(programs[rank]):
                action = programs[rank][at[rank]]
                if action.peer >= 0:
                    peer, theirs = self.other[rank, action]
                    if at[peer] != self.places[peer][theirs]:
                        break
                    at[peer] += 1
                    ready.append(peer)
                at[rank] += 1
        for rank, place in enumerate(at):
            if place < len(programs[rank]):
                self._deadlock(rank, at)

    def _deadlock(self, rank: int, at: Sequence[int]) -> NoReturn:
        """From one that waits to the one it waits for, until some of them are a circle."""
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            rank = self.programs[rank][at[rank]].peer
        circle = [(one, at[one]) for one in path[path.index(rank) :]]
        waits = []
        for one, place in circle:
            action = self.programs[one][place]
            waits.append(f"rank {one}, place {place}: {action} for rank {action.peer}")
        raise self._refusal(f"deadlock: {', '.join(waits)} wait in a circle", circle)

    def _fault(self, rank: int, action: Action, text: str, place: int | None = None) -> PlanError:
        place = self.places[rank][action] if place is None else place
        return self._refusal(f"rank {rank}, place {place}: {action} {text}", [(rank, place)])

    def _refusal(self, text: str, marked: Sequence[Cell]) -> PlanError:
        """With a grid of all ranks, as if they were one plan."""
        return PlanError(text, Plan((), tuple(self.programs)), marked)
