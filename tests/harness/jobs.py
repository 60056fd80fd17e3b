"""Jobs of several data-parallel ranks that share prompts: made at random, and played with names.

`played` knows nothing of the rules in `megatron_prefix/lab/plans/job_check.py`: messages carry the
names of spans, a rank adds up who sent it gradients, and what is asked for must be there.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from megatron_prefix.lab.plans.job_plan import job_plan
from megatron_prefix.plan.actions import Action, Plan, Transfer
from megatron_prefix.tree import Place, Segment, TreeOptions
from tests.harness.trees import flat_rollouts, random_trees

Computed = tuple[int, int]
"""A rank and the node that it computes."""


@dataclass
class Job:
    """Plans, and which node of the trees every span is.

    Attributes:
        plans: one a rank.
        ready_after: see planner.loss_ready_after, one a rank.
        nodes: per rank and segment the numbers of its spans' nodes.
        above: of every node the numbers of its ancestors, nearest first.
        owner: per rank and node on it the rank that computes it.
    """

    plans: list[Plan] = field(default_factory=list)
    ready_after: list[list[int]] = field(default_factory=list)
    nodes: list[list[list[int]]] = field(default_factory=list)
    above: list[list[int]] = field(default_factory=list)
    owner: list[dict[int, int]] = field(default_factory=list)

    def swapped(self, rng):
        """With two actions of a rank in each other's places, often neighbours."""
        rank = rng.choice([r for r, plan in enumerate(self.plans) if plan.segments])
        program = [*self.plans[rank].programs[0]]
        first = rng.randrange(len(program) - 1)
        second = rng.choice((first + 1, rng.randrange(len(program))))
        program[first], program[second] = program[second], program[first]
        plans = [*self.plans]
        plans[rank] = replace(plans[rank], programs=(tuple(program),))
        return replace(self, plans=plans)


# At random ----------------------------------------------------------------------------------------


def random_job(rng):
    """Random trees dealt to two to four ranks, and a plain program that can run.

    Level by level all forwards that are shared, with their messages, in one order of all ranks;
    then each rank's waves; then the gradients in reverse.
    """
    maker, job = _Maker(rng), Job()
    for rank in range(maker.num_ranks):
        maker.add_segments(rank, job)
    maker.write_programs(job)
    return job


def crossing_plan():
    """The first one of two ranks, each of which sends to the other."""
    return crossing_job().plans[0]


def crossing_job():
    """Six groups of four rollouts, of which each of two ranks has two."""
    rollouts, _ = flat_rollouts(64, 16, 4, 6)
    options = TreeOptions(min_gain=0, segment_tokens=64, share="batch")
    ranks = [[*rollouts[start::2]] for start in range(2)]
    return job_plan(ranks, [[*range(12)]] * 2, options)


class _Maker:
    def __init__(self, rng):
        self.rng, self.num_ranks = rng, rng.randint(2, 4)
        roots, _ = random_trees(rng)
        self.all = []
        self.above = []
        for root in roots:
            self._walk(root, [])
        self.dealt = [rng.randrange(self.num_ranks) for root in roots for _ in root.members]
        self.owner = [{} for _ in range(self.num_ranks)]
        bins = defaultdict(list)
        for number, node in enumerate(self.all):
            ranks = sorted({self.dealt[one] for one in node.members})
            chief = rng.choice(ranks)
            for rank in ranks:  # some run again what another rank runs, too
                self.owner[rank][number] = chief if rng.random() < 0.8 else rank
            if node.children:
                level = len(self.above[number])
                for one in {self.owner[rank][number] for rank in ranks} | {chief}:
                    self.owner[one][number] = one
                    bins[level, rng.randrange(2), one].append(number)
        self.groups = [(key[2], numbers) for key, numbers in sorted(bins.items())]

    def _walk(self, node, above):
        number = len(self.all)
        self.all.append(node)
        self.above.append(above)
        for child in node.children:
            self._walk(child, [number, *above])

    def on(self, rank, group):
        """Nodes of a group that a rank has from the group's owner."""
        owner, numbers = self.groups[group]
        return [number for number in numbers if self.owner[rank].get(number) == owner]

    def add_segments(self, rank, job):
        tables = [
            (self.on(rank, group), self.groups[group][0]) for group in range(len(self.groups))
        ]
        waves = [n for n in self.owner[rank] if not self.all[n].children]
        self.rng.shuffle(waves)
        while waves:
            size = self.rng.randint(1, 4)
            tables.append((waves[:size], rank))
            waves = waves[size:]
        places = {}
        segments = []
        nodes = []
        for numbers, owner in tables:
            if not numbers:
                continue
            spans = []
            for number in numbers:
                node, above = self.all[number], self.above[number]
                span = node.span(1, places[above[0]] if above else None)
                mine = tuple(one for one in node.members if self.dealt[one] == rank)
                spans.append(span._replace(rollouts=mine))
                places[number] = Place(len(segments), len(spans) - 1)
            inner = bool(self.all[numbers[0]].children)
            source = owner if owner != rank else -1
            segments.append(Segment(tuple(spans), inner, not inner, source=source))
            nodes.append(numbers)
        job.plans.append(Plan(tuple(segments), ((),)))
        job.nodes.append(nodes)
        job.above, job.owner = self.above, self.owner

    def write_programs(self, job):
        """Programs, transfers, and when losses are ready."""
        ranks = range(self.num_ranks)
        forwards, backwards = self._exchanges(job)
        for rank in ranks:
            plan = job.plans[rank]
            waves = [i for i, one in enumerate(plan.segments) if not one.inner]
            ready_after, middle = [*range(len(plan.segments))], []
            while waves:
                size = self.rng.randint(1, 3)
                batch, waves = waves[:size], waves[size:]
                middle += [Action("F", i) for i in batch] + [Action("B", i) for i in batch]
                ready_after[batch[0] : batch[-1] + 1] = [batch[-1]] * len(batch)
            program = (*forwards[rank], *middle, *reversed(backwards[rank]))
            transfers = tuple(
                Transfer(one.segment, one.peer, self._sent(job, rank, one))
                for one in forwards[rank]
                if one.kind == "S"
            )
            job.plans[rank] = Plan(plan.segments, (program,), transfers=transfers)
            job.ready_after.append(ready_after)

    def _sent(self, job, rank, send):
        owner, nodes = self.owner[send.peer], job.nodes[rank][send.segment]
        return tuple(i for i, node in enumerate(nodes) if owner.get(node) == rank)

    def _exchanges(self, job):
        """Per rank the actions of inner segments before the waves and, in reverse, after them."""
        before = [[] for _ in range(self.num_ranks)]
        after = [[] for _ in range(self.num_ranks)]
        reached = [0] * self.num_ranks
        for group, (owner, _) in enumerate(self.groups):
            index = reached[owner]
            before[owner].append(Action("F", index))
            after[owner].append(Action("B", index))
            reached[owner] += 1
            for peer in range(self.num_ranks):
                if peer != owner and self.on(peer, group):
                    before[owner].append(Action("S", index, 0, peer))
                    before[peer].append(Action("R", reached[peer], 0, owner))
                    after[owner].append(Action("R", index, 0, peer))
                    after[peer].append(Action("S", reached[peer], 0, owner))
                    reached[peer] += 1
        return before, after


# Played -------------------------------------------------------------------------------------------


def played(job):
    """Plays a job where every S and R blocks; returns what is wrong with it, or nothing."""
    player = _Player(job)
    at = [0] * len(job.plans)
    programs = [plan.programs[0] for plan in job.plans]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            action, peer = program[at[rank]], program[at[rank]].peer
            if peer < 0:
                fault = player.compute(rank, action)
                at[rank] += 1
            elif action.kind == "S" and at[peer] < len(programs[peer]):
                theirs = programs[peer][at[peer]]
                if (theirs.kind, theirs.peer) != ("R", rank):
                    continue
                fault = player.cross(rank, action, peer, theirs)
                at[rank] += 1
                at[peer] += 1
            else:
                continue
            if fault:
                return fault
            moved = True
    return "" if at == [*map(len, programs)] else "deadlock"


class _Player:
    """What every rank has: payloads of nodes, and whose gradients it added up for each."""

    def __init__(self, job):
        self.job = job
        self.payloads = [set() for _ in job.plans]
        self.summed = [defaultdict(set) for _ in job.plans]
        self.forwards = [set() for _ in job.plans]

    def compute(self, rank, action):
        nodes = self.job.nodes[rank][action.segment]
        if action.kind == "F":
            for node in nodes:
                if not self.payloads[rank].issuperset(self.job.above[node]):
                    return f"rank {rank}: {action} has not what it reads"
            self.payloads[rank].update(nodes)
            self.forwards[rank].add(action.segment)
            return ""
        segments = self.job.plans[rank].segments
        for index in range(self.job.ready_after[rank][action.segment] + 1):
            if segments[index].source < 0 and index not in self.forwards[rank]:
                return f"rank {rank}: {action} has no loss"
        for node in nodes:
            if self.summed[rank][node] != self._expected(rank, node):
                return f"rank {rank}: {action} has not all gradients"
            for above in self.job.above[node]:
                self.summed[rank][above].add((rank, node))
        return ""

    def _expected(self, rank, node):
        """What is below a node, and computed on a rank that has the node from this one."""
        having = [other for other, owner in enumerate(self.job.owner) if owner.get(node) == rank]
        return set().union(*(self._below(other, node) for other in having))

    def _below(self, rank, node):
        owner = self.job.owner[rank]
        return {(rank, n) for n in owner if owner[n] == rank and node in self.job.above[n]}

    def cross(self, rank, send, peer, receive):
        """Payloads of the nodes that the peer has from here, or gradients of those it gave."""
        nodes, owner = self.job.nodes, self.job.owner
        found, theirs = nodes[rank][send.segment], nodes[peer][receive.segment]
        payload = self.job.plans[rank].segments[send.segment].source < 0
        if payload:
            found = [node for node in found if owner[peer].get(node) == rank]
        else:
            theirs = [node for node in theirs if owner[rank].get(node) == peer]
        if found != theirs:
            return f"rank {rank}: {send} is not what {receive} takes"
        if payload:
            self.payloads[peer].update(found)
            return "" if self.payloads[rank].issuperset(found) else f"rank {rank}: {send} is empty"
        for node in found:
            if self.summed[rank][node] != self._below(rank, node):
                return f"rank {rank}: {send} has not all gradients"
            self.summed[peer][node] |= self.summed[rank][node]
        return ""
