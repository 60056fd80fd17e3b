"""Mistakes that tests should notice, as data for benchmarks/mutants.py.

Each changes what a step gives, what it takes, or what is refused. A text that is not exactly once
in its file makes the line stale: mend it with the code, or take the line out.
"""

from __future__ import annotations

from typing import NamedTuple

_PACKAGE = "megatron_prefix"


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        name: area/what is wrong.
        file: that has it.
        old: its text there, exactly once.
        new: what takes its place.
        tests: arguments of pytest, of one command after another: what should notice it.
        why: it may survive; what would notice it, or why nothing does.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    @property
    def area(self) -> str:
        """The first part of its name."""
        return self.name.partition("/")[0]


def _area(name: str, tests: str) -> _Area:
    return _Area(name, tests)


class _Area(NamedTuple):
    name: str
    tests: str

    def __call__(
        self, name: str, file: str, old: str, new: str, tests: str = "", why: str = ""
    ) -> Mutant:
        """A mutant of the area; `tests`: others than the area's, one command a line."""
        commands = tuple((tests or self.tests).splitlines())
        return Mutant(f"{self.name}/{name}", f"{_PACKAGE}/{file}", old, new, commands, why)


# Prompts across ranks ------------------------------------------------------------------------

_TREE = "tests/core/tree/test_across_ranks.py"
_FINAL = "tests/core/run/across/test_final_states.py"
_across = _area("across", _TREE)
_ACROSS = (
    _across(
        "first-loss-of-the-last-copy",
        "features/across/common.py",
        "trained_at[number] = min(trained_at[number], trained)",
        "trained_at[number] = trained",
    ),
    _across(
        "digests-of-blocks-apart",
        "features/across/common.py",
        "        digest.update(codes[start : start + block].data)",
        "        digest = hashlib.blake2b(codes[start : start + block].data, digest_size=_BYTES)",
    ),
    _across(
        "beginnings-end-with-a-shared-digest",
        "features/across/ranges.py",
        "kept = (having > 0) & (having != behind)",
        "kept = (having > 0) & (behind == 0)",
    ),
    _across(
        "answers-to-a-rank-alone",
        "features/across/ranges.py",
        "np.diff(places.bounds)[places.place] > 1",
        "np.diff(places.bounds)[places.place] > 0",
    ),
    _across(
        "spans-with-loss-among-others",
        "features/across/common.py",
        "together[span.depth, owners[number], span.scored].append(number)",
        "together[span.depth, owners[number], False].append(number)",
    ),
    _across(
        "final-states-of-all-spans",
        "features/across/final_states.py",
        "        if len(spans) == len(self._cache.map.lengths[index]):",
        "        if spans:",
        _FINAL,
    ),
    _across(
        "gradient-of-one-rank-only",
        "features/across/final_states.py",
        "            self._sent_back[index][begin:end] += part",
        "            self._sent_back[index][begin:end] = part",
        _FINAL,
    ),
    _across(
        "states-of-another-segment",
        "features/across/final_states.py",
        "if self._gathered is None or self._gathered[0] != index:",
        "if self._gathered is None:",
        _FINAL,
    ),
    _across(
        "received-states-not-cloned",
        "features/across/final_states.py",
        "full.chunk(self._parts)[self._group.rank()].clone()",
        "full.chunk(self._parts)[self._group.rank()]",
        _FINAL,
    ),
)

# Keys in front ------------------------------------------------------------------------------

_fronts = _area("fronts", "tests/test_cases.py -k chunks")
_FRONTS = (
    _fronts(
        "copies-side-by-side-with-others",
        "layers/blocks/front.py",
        '        copies = copies[np.argsort(places[copies], kind="stable")]\n',
        "",
    ),
    _fronts(
        "gradients-of-copies-not-sent",
        "layers/blocks/front.py",
        "        self._cache.add(*self._place, front.reading, sums)\n",
        "",
    ),
    _fronts(
        "in-front-and-a-call-as-well",
        "layers/blocks/core.py",
        "number for number in numbers if number not in in_front",
        "numbers",
    ),
    _fronts(
        "as-many-copies-as-there-are",
        "tree/fronts.py",
        "        if total <= min(MOST_COPIES * starts[-1], PIECE_KEYS):",
        "        if total:",
        "tests/core/tree/test_fronts.py\ntests/core/layers/test_front.py",
    ),
)

# Graphs --------------------------------------------------------------------------------------

_G = "tests/core/features/graphs/test_graphs.py"
_G_HYBRID = "tests/core/features/graphs/test_graphs_hybrid.py"
_G_MEMORY = "tests/core/features/graphs/test_graphs_memory.py"
_G_PLACED = "tests/core/features/graphs/test_placed.py"
_G_RANKS = "tests/core/features/graphs/test_graphs_ranks.py"
_CHOICE = "tests/core/features/graphs/test_graph_choice.py"
_G_ROWS = "tests/test_cases_with_graphs.py"
_graphs = _area("graphs", f"{_G}\n{_G_ROWS}")
_GRAPHS = (
    _graphs(
        "further-layers-given-up-with-the-decoders",
        "features/graphs/layers.py",
        "            return layer.kinds, 0 < self.further <= layer.number",
        "            return layer.kinds, False",
        _G_HYBRID,
    ),
    _graphs(
        "further-layers-numbered-as-if-one-followed-the-other",
        "features/graphs/part.py",
        "            yield 2 * place, layer, parts",
        "            yield place, layer, parts",
        _G_HYBRID,
    ),
    _graphs(
        "one-place-for-all-waves",
        "plan/memory.py",
        "taken = [self._running(inside & ~inner & on) + (inside & inner & on) for on in chunks]",
        "taken = [1.0 * (inside & on) for on in chunks]",
        "tests/core/plan/test_memory_policy.py",
    ),
    _graphs(
        "settled-whatever-they-hold",
        "features/graphs/part.py",
        "            self._choose(before, before.settled(has_room=has_room))",
        "            self._choose(before, before)",
        "tests/core/features/graphs/test_graphs_auto.py",
    ),
    _graphs(
        "the-first-step-without-room-decides",
        "features/graphs/choice.py",
        "        if self.crowded + 1 < NO_ROOM:",
        "        if self.crowded + 2 < NO_ROOM:",
        _CHOICE,
    ),
    _graphs(
        "input-gradient-not-cloned",
        "features/graphs/pieces.py",
        "            yield of_input.clone() if self._is_first else of_input.detach()",
        "            yield of_input.detach()",
    ),
    _graphs(
        "parameter-gradient-not-cloned",
        "features/graphs/pieces.py",
        "                yield gradient.clone()  # it may stay the parameter's gradient",
        "                yield gradient.detach()",
    ),
    _graphs(
        "sum-of-gradients-is-the-first",
        "features/graphs/pieces.py",
        "        torch.add(*tensors, out=place)",
        "        _put([place], tensors[:1])",
    ),
    _graphs(
        "borrowed-gradient-not-cloned",
        "features/graphs/pieces.py",
        "lender._lent.append((edge, gradient.clone() if is_overwritten else gradient))",
        "lender._lent.append((edge, gradient))",
    ),
    _graphs(
        "inputs-of-the-capture",
        "features/graphs/pieces.py",
        "        _fill(self.inputs, inputs)\n",
        "",
    ),
    _graphs(
        "place-without-gradient-not-zeroed",
        "features/graphs/pieces.py",
        "        place.zero_()",
        "        pass",
    ),
    _graphs(
        "added-by-another-backward",
        "features/graphs/pieces.py",
        "                    setattr(stand_in, _ADDED, False)",
        "                    pass",
    ),
    _graphs(
        "added-not-told",
        "features/graphs/pieces.py",
        "            setattr(added, _ADDED, True)",
        "            setattr(added, _ADDED, False)",
    ),
    _graphs(
        "nodes-of-pieces-forgotten",
        "features/graphs/capture.py",
        "        self._nodes |= dict.fromkeys(result.nodes, piece)\n",
        "",
        f"{_G_ROWS} -k gdn\n{_G_HYBRID}",
    ),
    _graphs(
        "residual-elsewhere",
        "features/graphs/capture.py",
        "        if place.data_ptr() != hidden.data_ptr():\n            hidden = put_at",
        "        if False:\n            hidden = put_at",
        f"{_G_MEMORY}\n{_G_HYBRID}",
        why="numbers are the same: it is copied behind the norm, which holds more memory then",
    ),
    _graphs(
        "rotary-of-the-capture",
        "features/graphs/segment_graphs.py",
        "            self.place(ROTARY, turned).copy_(turned)\n        for name in self._tables:",
        "            pass\n        for name in self._tables:",
    ),
    _graphs(
        "rotary-tables-of-the-capture",
        "features/graphs/segment_graphs.py",
        "            self.place((ROTARY, name), rows).copy_(rows)",
        "            pass",
        f"{_G} -k tables",
    ),
    _graphs(
        "gathered-buffers-not-held",
        "features/graphs/segment_graphs.py",
        "        self._kept += _shared_buffers()",
        "        _shared_buffers()",
        f"{_G_RANKS}\ntests/test_cases_on_ranks.py -k tp2_sp",
        why="the graphs of the tests, noted launches, hold what they read; CUDA's do not",
    ),
    _graphs(
        "moved-weights-not-seen",
        "features/graphs/layers.py",
        "        moved = bool(self._addresses) and self._addresses != self._current_addresses()",
        "        moved = False",
    ),
    _graphs(
        "frozen-weights-not-seen",
        "features/graphs/inside.py",
        "        return [*places, *map(_is_trained, parameters)]",
        "        return [*places]",
    ),
    _graphs(
        "sets-of-moved-weights-stay",
        "features/graphs/layers.py",
        "            self._free.clear()\n            self._addresses = ()\n"
        "        if self._watched",
        "            self._addresses = ()\n        if self._watched",
    ),
    _graphs(
        "hooks-not-seen",
        "features/graphs/layers.py",
        '    return any(package(hook) != "megatron_prefix" for hook in hooks)',
        "    return False",
    ),
    _graphs(
        "hooks-of-new-modules-not-seen",
        "features/graphs/inside.py",
        "        if _all(self._held()[0]) != self._children:\n            self._list()\n",
        "",
    ),
    _graphs(
        "one-set-of-two-segments",
        "features/graphs/layers.py",
        "        self._free.remove(chosen)\n",
        "",
    ),
    _graphs(
        "form-without-its-policy",
        "features/graphs/layers.py",
        "        taps_mlps = self._running.mlp_tap is not None",
        "        taps_mlps = False",
        f"{_G}\n{_G_MEMORY}",
    ),
    _graphs(
        "chained-past-hooks",
        "features/graphs/layers.py",
        "        return GraphForm(len(hidden), taps_mlps, placed, self._handed and not watched)",
        "        return GraphForm(len(hidden), taps_mlps, placed, self._handed)",
        _G_PLACED,
    ),
    _graphs(
        "one-payload-of-a-chain",
        "features/graphs/layers.py",
        "                for number in sides.inside:",
        "                for number in sides.inside[:1]:",
        _G_PLACED,
    ),
    _graphs(
        "stock-beside-graphs",
        "megatron/stock.py",
        '    if not arguments.get("forward_only"):\n        give_back(arguments["model"])\n',
        "",
        "tests/core/features/graphs/test_graphs_auto.py",
    ),
    _graphs(
        "arenas-beside-stock",
        "features/graphs/layers.py",
        "        self.arenas.give_back()\n",
        "",
        "tests/core/features/graphs/test_graphs_auto.py",
    ),
    _graphs(
        "made-anew-for-ever",
        "features/graphs/part.py",
        " or self.kept.get(_MADE, 0) >= MOST_MADE",
        "",
        "tests/core/features/graphs/test_graphs_auto.py",
    ),
    _graphs(
        "all-or-no-graphs",
        "features/graphs/choice.py",
        "        return replace(self, tokens=self._shorter, guessed=guessed)",
        "        return replace(self, is_open=False, tokens=0)",
        _CHOICE,
    ),
    _graphs(
        "no-second-try",
        "features/graphs/choice.py",
        "self.guessed or (0 if known or self._shorter >= self.waits else self.tokens)",
        "0",
        _CHOICE,
    ),
    _graphs(
        "arenas-of-other-steps-are-free",
        "plan/memory.py",
        "        self._cache = np.maximum(self._cache, footprint.cache_least)\n",
        "",
        "tests/core/plan/test_memory_policy.py",
    ),
    _graphs(
        "gradients-that-stay-come-late",
        "plan/memory.py",
        "        self._late *= footprint.cache_least == 0",
        "        self._late *= 1",
        "tests/core/plan/test_memory_policy.py",
    ),
    _graphs(
        "experts-in-places",
        "plan/sizes.py",
        "self._spared(act) if self._footprint.placed else row",
        "row",
        "tests/core/plan/test_memory_policy.py",
    ),
    _graphs(
        "uncounted-sets-stay",
        "features/graphs/layers.py",
        "                kept[graphs.most] -= 1\n",
        "",
        _G_MEMORY,
    ),
    _graphs(
        "sent-states-stay-in-their-place",
        "features/graphs/layers.py",
        "            stays, left = saves or layer is not self._all[-1], None",
        "            stays, left = True, None",
    ),
    _graphs(
        "longer-than-its-set",
        "features/graphs/layers.py",
        "        fits = [g for g in self._free if (g.passes, g.most) == (passes, place)]",
        "        fits = [g for g in self._free if g.passes == passes]",
        _G_MEMORY,
    ),
    _graphs(
        "streams-do-not-meet",
        "features/graphs/cuda.py",
        "    outer.wait_stream(inner)",
        "    pass",
        _G_MEMORY,
    ),
    _graphs(
        "bytes-counted-twice",
        "features/graphs/cuda.py",
        'block["total_size"] - block["allocated_size"]',
        'block["total_size"]',
        _G_MEMORY,
    ),
    _graphs(
        "kept-if-they-do-not-pay",
        "features/graphs/choice.py",
        "if used and ratio <= PAYS * min(self.without):",
        "if used and ratio >= PAYS * min(self.without):",
        _CHOICE,
    ),
    _graphs(
        "half-of-the-longest",
        "features/graphs/choice.py",
        "tokens=power(counted.waits)",
        "tokens=power(counted.waits) // 2",
        _CHOICE,
    ),
    _graphs(
        "where-the-host-waits",
        "features/graphs/choice.py",
        "host[action] >= WAITS * seconds",
        "host[action] <= WAITS * seconds",
        _CHOICE,
    ),
    _graphs(
        "places-of-the-next-size",
        "plan/sizes.py",
        "(longest // max(1, positions)).bit_length() - 1)",
        "(longest // max(1, positions)).bit_length())",
        _CHOICE,
    ),
    _graphs(
        "ended-graphs-stay",
        "megatron/install.py",
        "            earlier.give_back()\n",
        "            pass\n",
    ),
    _graphs(
        "graphs-with-fewer-keys",
        "features/graphs/placed.py",
        "level.runs >= needed.runs and needed.keys <= level.keys <= MORE_ROWS * needed.keys",
        "level.runs >= needed.runs and level.keys <= MORE_ROWS * needed.keys",
        _G_MEMORY,
    ),
    _graphs(
        "gradients-of-nobodys-keys-stay",
        "features/graphs/placed_runs.py",
        "                gradient.masked_fill_(nobody[:, None, None], 0.0)\n",
        "                pass\n",
        _G_PLACED,
    ),
    _graphs(
        "latents-without-their-descendants",
        "features/graphs/placed.py",
        "return tuple(place.index_select(0, written) for place in self._sums(layer))",
        "return tuple(0 * place.index_select(0, written) for place in self._sums(layer))",
        _G_ROWS,
    ),
    _graphs(
        "windows-end-with-the-first-key",
        "features/graphs/placed_runs.py",
        "behind = key_place - (place + before)[:, None]",
        "behind = key_place - place[:, None]",
        _G_PLACED,
    ),
    _graphs(
        "own-keys-behind-those-that-are-read",
        "features/graphs/placed_tails.py",
        "key_order(lengths, spans, window, self._form.read)",
        "key_order(lengths, spans, window, num_read)",
        _G_PLACED,
    ),
    _graphs(
        "states-where-keys-are-written",
        "features/graphs/placed.py",
        "            return self._sheet.spans.written\n",
        "            return self._sheet.written[: len(self._sheet.spans)]\n",
        _G_ROWS,
    ),
    _graphs(
        "rows-that-are-there-twice-count-twice",
        "features/recurrent/moves.py",
        "of_rows.masked_fill_(repeats.bool()[:, None], 0)",
        "pass",
        "tests/core/features/recurrent/test_states.py",
    ),
    _graphs(
        "missing-spans-are-their-parents-children",
        "features/graphs/placed_spans.py",
        "self._padded(numbers, 0)",
        "self._padded(numbers, 1)",
        _G_PLACED,
    ),
    _graphs(
        "first-gradient-is-written-first",
        "features/graphs/pieces.py",
        "_fill(self._gradients[::-1], gradients[::-1])",
        "_fill(self._gradients, gradients)",
        _G_HYBRID,
    ),
    _graphs(
        "what-others-have-replaced-stays",
        "features/graphs/cut_layer.py",
        "[part for part in self.unrouted if part.is_stock]",
        "self.unrouted",
        _G_HYBRID,
    ),
    _graphs(
        "routers-product-runs-again",
        "features/graphs/cut_layer.py",
        "if of_router and given_norm and",
        "if False and of_router and given_norm and",
        _G_HYBRID,
    ),
    _graphs(
        "captures-are-time-of-a-step",
        "features/graphs/part.py",
        "(step.seconds - counts.captured) / work",
        "step.seconds / work",
        "tests/core/features/graphs/test_graphs_auto.py",
    ),
    _graphs(
        "places-are-as-long-as-segments",
        "plan/sizes.py",
        "        pool = self._places * np",
        "        pool = self.positions * np",
        "tests/core/plan/test_memory_policy.py",
    ),
    _graphs(
        "the-last-step-that-waits",
        "features/graphs/choice.py",
        "waits=max(self.waits, waits)",
        "waits=waits",
        _CHOICE,
    ),
    _graphs(
        "others-graphs-stay-beside",
        "features/graphs/layers.py",
        "            has_light = fewer[graphs.passes] or",
        "            has_light =",
        "tests/core/features/graphs/test_graphs_memory.py",
    ),
    _graphs(
        "lengths-never-stay",
        "plan/step_planner.py",
        "best.prediction.prefix_seconds > least",
        "best.prediction.prefix_seconds > last.prediction.prefix_seconds",
        "tests/core/plan/test_joint_forest.py",
    ),
    _graphs(
        "never-tried-where-sharing-is-slow",
        "features/graphs/part.py",
        "ratio * SLOWER < 1:",
        "ratio < 1:",
        "tests/core/features/graphs/test_graphs_auto.py",
    ),
    _graphs(
        "gradients-added-in-another-order",
        "features/graphs/pieces.py",
        "functools.reduce(torch.add, gradients)",
        "functools.reduce(torch.add, gradients[::-1])",
        "tests/core/features/graphs/test_graphs_hybrid.py",
    ),
    _graphs(
        "shared-experts-at-once",
        "features/graphs/cut_layer.py",
        "        if vars(self._apart).get(_SEND) != self._sending:",
        "        if self._apart is not None:",
        "tests/core/features/graphs/test_graphs_hybrid.py",
    ),
    _graphs(
        "shared-experts-wait-for-others",
        "features/graphs/cut_layer.py",
        "        if vars(self._apart).get(_SEND) != self._sending:",
        "        if self._apart is None:",
        "tests/core/features/graphs/test_graphs_hybrid.py",
    ),
    _graphs(
        "no-place-that-just-holds-what-waits",
        "features/graphs/choice.py",
        "return close if half < close < self.tokens else half",
        "return half",
        _CHOICE,
    ),
    _graphs(
        "short-of-room-and-slow-is-the-end",
        "features/graphs/choice.py",
        "        if self.tokens == half * 2:\n",
        "        if half:\n",
        _CHOICE,
    ),
    _graphs(
        "late-for-ever",
        "features/graphs/choice.py",
        "            if slow == ENOUGH or self.late == MOST_LATE:",
        "            if slow == ENOUGH:",
        _CHOICE,
    ),
)

# Vision --------------------------------------------------------------------------------------

_GIVEN = "tests/core/run/read/test_given.py"
_TOWER = "tests/core/run/read/test_tower.py"
_PRINTS = "tests/core/run/read/test_given.py"
_TRITON = "tests/core/device/test_fusion.py -k 'kernel_equals and words'"
_STEPS = "tests/core/alignment/test_vision.py"
_vision = _area("vision", _GIVEN)
_VISION = (
    _vision(
        "deepstack-row-of-the-next-position",
        "features/vision/call_rows.py",
        "numbers = torch.where(visible, visible.cumsum(0) - 1, -1)",
        "numbers = torch.where(visible, (visible.cumsum(0) - 2).clamp(min=0), -1)",
        f"{_GIVEN}\n{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "kept-rows-in-another-order",
        "features/vision/call_rows.py",
        "torch.arange(len(places[0]), device=self._slots.device)",
        "torch.arange(len(places[0]), device=self._slots.device).flip(0)",
    ),
    _vision(
        "deepstack-not-in-the-words",
        "features/vision/call_rows.py",
        "numbers = torch.where(visible, combined(numbers, rows[self.numbers]), numbers)",
        "numbers = torch.where(visible, numbers, numbers)",
    ),
    _vision(
        "deepstack-of-the-first-images",
        "features/vision/call_rows.py",
        "            into[layer, at] = deep.detach()[numbers].to(into.dtype)",
        "            into[layer, at] = deep.detach()[: len(numbers)].to(into.dtype)",
        f"{_GIVEN}\n{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "deepstack-gradients-are-the-embeddings'",
        "features/vision/call_rows.py",
        "            gradient[numbers] = gradients[layer, at].to(gradient.dtype)",
        "            gradient[numbers] = gradients[0, at].to(gradient.dtype)",
    ),
    _vision(
        "gradients-of-the-last-segment",
        "features/vision/call_rows.py",
        "        if not self.gradients:\n            self.gradients = [",
        "        if True:\n            self.gradients = [",
    ),
    _vision(
        "deepstack-gradients-dropped",
        "features/vision/call_rows.py",
        "(full, *deep_gradients), strict=True)",
        "(full, *map(torch.zeros_like, deep_gradients)), strict=True)",
    ),
    _vision(
        "shift-with-its-sign",
        "features/vision/fingerprints.py",
        "    return (x >> shift) & ((1 << (64 - shift)) - 1)",
        "    return x >> shift",
        _PRINTS,
    ),
    _vision(
        "values-instead-of-bits",
        "features/vision/fingerprints.py",
        "    words = rows.contiguous().view(_WORDS[rows.element_size()])",
        "    words = rows.contiguous().to(_WORDS[rows.element_size()])",
        _PRINTS,
    ),
    _vision(
        "pairs-without-order",
        "features/vision/fingerprints.py",
        "    return _mixed(_mixed(first) * _FACTOR + second)",
        "    return _mixed(first + second)",
        _PRINTS,
    ),
    _vision(
        "columns-without-order",
        "features/vision/fingerprints.py",
        "_mixed(part.long() ^ keys[0]).mul_(keys[1]).sum(-1)",
        "_mixed(part.long()).sum(-1)",
        _PRINTS,
    ),
    _vision(
        "triton-reads-the-other-key",
        "features/vision/fingerprints_triton.py",
        "tl.load(keys + width + column, mask=inside, other=0)",
        "tl.load(keys + column, mask=inside, other=0)",
        _TRITON,
    ),
    _vision(
        "triton-without-its-last-step",
        "features/vision/fingerprints_triton.py",
        "        x = x ^ _shifted(x, 32)\n",
        "",
        _TRITON,
    ),
    _vision(
        "other-tokens-of-equal-rows-shared",
        "features/vision/chunk_rows.py",
        "words = combined(words, to_device(self._device, tokens))",
        "pass",
    ),
    _vision(
        "further-tokens-stand-for-rows",
        "features/mtp/given.py",
        "replace(sample, inputs=ids, labels",
        "replace(sample, labels",
        f"{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "further-labels-stand-for-rows",
        "features/mtp/given.py",
        "sample.labels if labelled else np.append(ids[1:], 0)",
        "sample.labels",
    ),
    _vision(
        "further-tokens-in-the-order-of-ranks",
        "features/mtp/given.py",
        "to_device(rank.device, tokens), cp))[order]",
        "to_device(rank.device, tokens), cp))",
        f"{_STEPS} -k 'stock_schedules and CP2'",
    ),
    _vision(
        "further-tokens-position-by-position",
        "features/mtp/given.py",
        "columns.append(tokens.reshape(-1))",
        "columns.append(tokens.T.reshape(-1))",
        f"{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "further-tokens-of-another-layout",
        "features/mtp/given.py",
        "tokens.shape != shape_of(call, sequence_ranks):",
        "tokens.numel() != shape_of(call, sequence_ranks).numel():",
    ),
    _vision(
        "further-rotary-positions-left-out",
        "features/mtp/layer.py",
        "rotary_pos_emb=self._hooks.angles,",
        "rotary_pos_emb=None,",
        f"{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "further-inputs-of-the-call",
        "features/mtp/layer.py",
        '"embedding": _Embedding(embedding, own)}',
        '"embedding": embedding}',
        f"{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "rotary-slice-not-for-further-layers",
        "megatron/install.py",
        "        self.angles = call_angles if isinstance(call_angles, Tensor) else None\n",
        "        self.angles = None if self.rotary_slice is not None else call_angles\n",
        f"{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "further-tokens-kept-of-text-alone",
        "features/mtp/part.py",
        "self._beside is not None or has_mrope(self.rank.language_models[0])",
        "self._beside is None",
        f"{_STEPS} -k 'stock_schedules and one'",
    ),
    _vision(
        "further-labels-move-by-padded-ends",
        "features/mtp/patches.py",
        'return _PADDED_ENDS in getattr(code, "co_names", ())',
        "return True",
        "tests/core/layers/test_mtp.py -k padding",
    ),
    _vision(
        "padding-of-the-next-row",
        "features/vision/chunk_rows.py",
        "np.minimum(steps, max(span.length - 1, 0))",
        "np.minimum(steps, span.length)",
    ),
    _vision(
        "padding-has-gradients",
        "features/vision/chunk_rows.py",
        "own.append((steps < span.length) & bool(span.rollouts))",
        "own.append((steps >= 0) & bool(span.rollouts))",
        f"{_GIVEN}\n{_STEPS} -k 'stock_schedules and CP2'",
    ),
    _vision(
        "positions-of-another-slice",
        "features/vision/chunk_rows.py",
        "cp_layout.rank_positions(size * len(rows), self._cp.rank(), size)",
        "np.arange(len(rows))",
        f"{_STEPS} -k 'stock_schedules and CP2'",
    ),
    _vision(
        "gradients-stay-on-their-rank",
        "features/vision/chunk_rows.py",
        "        row_gradients = self._exchanged(row_gradients)\n",
        "",
        f"{_STEPS} -k 'stock_schedules and SP'",
    ),
    _vision(
        "second-attempt-adds-to-the-first",
        "features/vision/chunk_rows.py",
        "        for call in self._calls:\n            call.gradients = []\n",
        "",
    ),
    _vision(
        "positions-not-in-the-codes",
        "features/vision/chunk_rows.py",
        "words = combined(words, _bits(local))",
        "words = combined(words, torch.zeros_like(words))",
    ),
    _vision(
        "rows-of-the-first-sequence-rank",
        "features/vision/chunk_rows.py",
        "at = np.arange(rows * self._sequence_ranks) - tp * rows",
        "at = np.arange(rows * self._sequence_ranks)",
        f"{_STEPS} -k 'stock_schedules and SP'",
    ),
    _vision(
        "positions-in-another-order",
        "features/vision/chunk_rows.py",
        "ids = torch.cat([ids.flatten(1) for ids in every], 1)",
        "ids = torch.cat([ids.flatten(1).flip(0) for ids in every], 1)",
        f"{_STEPS} -k 'stock_schedules'",
    ),
    _vision(
        "sum-is-a-gradient-of-others",
        "features/vision/tower.py",
        "self.sums[place] = gradient.to(wider(gradient.dtype), copy=True)",
        "self.sums[place] = gradient.to(wider(gradient.dtype))",
        _TOWER,
    ),
    _vision(
        "gradient-of-the-last-copy",
        "features/vision/tower.py",
        "                before.add_(gradient)",
        "                before.copy_(gradient)",
        _TOWER,
    ),
    _vision(
        "images-without-their-grid",
        "features/vision/tower.py",
        "keys.append((item.sizes, numbers[:count].tobytes()))",
        "keys.append(((), numbers[:count].tobytes()))",
        _TOWER,
    ),
    _vision(
        "sums-of-the-first-attempt",
        "features/vision/tower.py",
        "        self.waits = True\n        for image in self._images.values():\n"
        "            image.sums = [None] * len(image.rows)",
        "        self.waits = True",
        f"{_TOWER}\n{_GIVEN}",
    ),
    _vision(
        "overwritten-patches",
        "features/vision/tower.py",
        "            if image.version != _version(image.item.patches):",
        "            if image.version > _version(image.item.patches):",
        _TOWER,
    ),
    _vision(
        "videos-as-one-image",
        "features/vision/forms.py",
        "            grids[:, 0] = 1  #",
        "            grids[:, 0] = grids[:, 0]  #",
        _TOWER,
    ),
    _vision(
        "clips-beside-longer-ones",
        "features/vision/forms.py",
        "        if self._longest and len(",
        "        if False and len(",
        _TOWER,
    ),
    _vision(
        "padding-of-pixels-counts",
        "features/vision/forms.py",
        "                part[..., :h, :w]\n",
        "                part\n",
        _TOWER,
    ),
    _vision(
        "frames-of-a-video-are-images",
        "features/vision/forms.py",
        '"num_frames": [num]})',
        '"num_frames": [1] * num})',
        _TOWER,
    ),
    _vision(
        "positions-that-move-at-random",
        "features/vision/models.py",
        '    moves = tower.training and getattr(tower, "has_cpe", False)',
        "    moves = False",
        _TOWER,
    ),
    _vision(
        "fractions-of-positions-are-cut-off",
        "features/vision/chunk_rows.py",
        "return positions.double().view(torch.int64) if fractions else positions",
        "return positions.long() if fractions else positions",
        _GIVEN,
    ),
    _vision(
        "positions-of-one-sample-alone",
        "features/vision/chunk_rows.py",
        "ids.expand(-1, num, -1) if ids.shape[1] == 1 else ids for ids, num in pairs",
        "ids for ids, num in pairs",
        _GIVEN,
    ),
    _vision(
        "a-pack-has-a-row-a-sample",
        "features/vision/chunk_rows.py",
        "[1 if packed else int(num) for",
        "[int(num) for",
        _GIVEN,
    ),
    _vision(
        "backward-without-autocast",
        "features/vision/tower.py",
        "        with torch.enable_grad(), self._settings.autocasting():",
        "        with torch.enable_grad():",
        _TOWER,
    ),
)

# Kimi K3's layers, and layers with several residual streams -----------------------------------

_KIMI = "tests/core/alignment/test_kimi.py\ntests/test_cases.py -k kimi"
_KIMI_RANKS = "tests/test_cases_on_ranks.py -k 'step and ({}) and not vpp'"
_kimi = _area("kimi", _KIMI)
_KIMI_CP = "tests/test_cases_on_ranks.py -k 'step and cp2 and not cp2_ and not _cp2'"
_KIMI_LAYER, _KIMI_KIND = "features/kda/layer.py", "features/kda/kind.py"
_OF_KIMI = (
    _kimi("rule-without-states", _KIMI_LAYER, "        setattr(kernels, RULE, self._rule)\n", ""),
    _kimi(
        "convolutions-share-a-tail", _KIMI_LAYER,
        "slice(number * width, (number + 1) * width)", "slice(0, width)",
    ),
    _kimi("states-of-the-last-convolution", _KIMI_LAYER, "if number == 0:", "if True:"),
    _kimi(
        "tails-in-another-order", "features/recurrent/states.py",
        "torch.cat(self._left, -1)", "torch.cat(self._left[::-1], -1)",
    ),
    _kimi(
        "other-heads-decay", _KIMI_LAYER, "options[name].chunk(size)[rank]",
        "options[name].chunk(size)[0]", _KIMI_CP,
    ),
    _kimi(
        "positions-still-move", _KIMI_LAYER,
        "rebound(module.forward, **dict.fromkeys(_MOVES, _stays))", "module.forward", _KIMI_CP,
    ),
    _kimi(
        "ranks-still-pass-states", _KIMI_LAYER, "yield self._module, name, self._alone(stock)",
        "yield self._module, name, stock", _KIMI_CP,
    ),
    _kimi(
        "latents-of-a-rank-alone", _KIMI_LAYER, 'projection, sharded = "kv_b_proj", False',
        'projection, sharded = "kv_b_proj", True', _KIMI_RANKS.format("tp2_sp"),
    ),
    _kimi(
        "a-state-too-few-is-sent", _KIMI_KIND, "1 + -(-layers // ", "1 + (layers // ",
    ),
    _kimi(
        "gradients-of-other-widths", "run/execute/messages.py",
        'numbers[-1] if kind == "B" else numbers[0] - 1', "numbers[0] - 1",
        _KIMI_RANKS.format("pp2"),
    ),
    _kimi(
        "more-is-sent-behind-the-last-layer", _KIMI_KIND, "return 1 if is_last else", "return",
    ),
    _kimi(
        "a-stage-without-layers-gets-more", "run/execute/messages.py",
        "or [rank.config.num_layers + 1, 0]", "or [1]",
    ),
    _kimi(
        "padding-left-out-is-taken", "features/__init__.py",
        'lambda _, rank: hasattr(rank.config, "kimi_kda_layers"),', "lambda *_: False,",
    ),
    _kimi(
        "parts-of-a-gradient-taken", _KIMI_KIND, "if getattr(parameter, MARK, False) and",
        "if False and",
    ),
    _kimi(
        "marks-that-are-read-refused", _KIMI_KIND, "if any(MARK in (", "if any(0 in (",
    ),
    _kimi("heads-that-ranks-cannot-share", _KIMI_KIND, "if heads % ranks:", "if heads < 0:"),
    _kimi(
        "rule-tried-with-one-decay-a-head", _KIMI_LAYER, "g.unsqueeze(-1)", "0 * g.unsqueeze(-1)",
    ),
    _kimi("streams-sent-as-one", "features/streams/kind.py", "return next(", "return 1 or next("),
    _kimi(
        "own-layers-end-early", "megatron/install.py",
        'if not families.forward_owner(layer).endswith(".TransformerLayer"):', "if False:",
        "tests/core/alignment/test_fused_gradients.py",
    ),
)  # fmt: skip

# A trainer's own GatedDeltaNet ---------------------------------------------------------------

_OWN = "tests/core/alignment/test_own_delta.py\ntests/test_cases.py -k own"
_OWN_RANKS = "tests/test_cases_on_ranks.py -k 'step and (tp2_sp or pp2 or dp2)'"
_OWN_CP = "tests/test_cases_on_ranks.py -k 'step and cp2 and not cp2_ and not _cp2'"
_own = _area("own-gdn", _OWN)
_OWN_GDN = (
    _own(
        "spans-not-told",
        "features/own_gdn/layer.py",
        '{**kwargs, "packed_seq_params": self._packing(context)}',
        "kwargs",
    ),
    _own(
        "convolution-sees-a-row-too-few",
        "features/own_gdn/layer.py",
        "before = self._inside.conv1d.weight.shape[-1] - 1",
        "before = self._inside.conv1d.weight.shape[-1] - 2",
    ),
    _own(
        "rule-of-an-instance-not-replaced",
        "features/own_gdn/layer.py",
        "        if hasattr(self._inside, _RULE):",
        "        if False:",
    ),
    _own(
        "rule-of-a-file-not-replaced",
        "features/own_gdn/layer.py",
        "self._within = _alone(inside, self._rule)",
        "self._within = inside.forward",
    ),
    _own(
        "convolution-not-replaced",
        "features/own_gdn/layer.py",
        '            (self._inside.conv1d, "forward", self._convolved),\n',
        "",
    ),
    _own(
        "mixing-not-looked-for",
        "features/own_gdn/layer.py",
        "    return not error <= tolerance.tolerance(x.dtype, 12, inputs.in_features, 1)",
        "    return False",
    ),
    _own(
        "mixing-that-cannot-be-told",
        "features/own_gdn/layer.py",
        "        return True\n    finally:",
        "        return False\n    finally:",
    ),
    _own(
        "one-piece-is-the-whole",
        "features/own_gdn/layer.py",
        "x.split((5, 7), 1)",
        "x.split(12, 1)",
    ),
    _own(
        "the-stand-in-rule-stays",
        "features/own_gdn/layer.py",
        "            vars(inside)[_RULE] = own\n",
        "            pass\n",
    ),
    _own(
        "heads-of-values-for-keys",
        "features/own_gdn/kind.py",
        '"linear_num_key_heads": inside.num_k_heads',
        '"linear_num_key_heads": inside.num_v_heads',
    ),
    _own(
        "the-other-layers",
        "features/own_gdn/kind.py",
        "for n in range(config.num_hidden_layers) if (n + 1) % every)",
        "for n in range(config.num_hidden_layers) if n % every)",
    ),
    _own(
        "layers-counted-from-one",
        "features/own_gdn/kind.py",
        'return layer in getattr(config, "own_delta_layers", ())',
        'return layer + 1 in getattr(config, "own_delta_layers", ())',
    ),
    _own(
        "layers-of-other-mixers",
        "features/own_gdn/kind.py",
        "if module.layer_number - 1 not in layers:",
        "if module.layer_number not in layers:",
    ),
    _own(
        "stages-begin-at-zero",
        "features/own_gdn/kind.py",
        "result += range(start, start + get_num_layers_to_build(config, part, stage))",
        "result += range(get_num_layers_to_build(config, part, stage))",
        f"{_OWN}\n{_OWN_RANKS}",
    ),
    _own(
        "context-parallelism-not-refused",
        "features/own_gdn/kind.py",
        'if ranks > 1 and not getattr(module, "hybrid_cp", False):',
        'if ranks > 2 and not getattr(module, "hybrid_cp", False):',
    ),
    _own(
        "context-parallelism-of-others",
        "features/own_gdn/kind.py",
        '        and {*MOVES} <= _names(type(module), "forward")\n',
        "",
    ),
    _own(
        "heads-that-do-not-divide",
        "features/own_gdn/kind.py",
        "elif inside.num_k_heads % ranks or inside.num_v_heads % ranks:",
        "elif inside.num_v_heads % ranks:",
    ),
    _own(
        "all-heads-on-context-parallel-ranks",
        "features/own_gdn/kind.py",
        "sharding._replace(tp=1)",
        "sharding._replace(tp=1, cp=1)",
        _OWN_CP,
    ),
    _own(
        "positions-as-they-were-gathered",
        "features/own_gdn/heads.py",
        "flatten(0, 1).index_select(0, self._order)[None]",
        "flatten(0, 1)[None]",
        _OWN_CP,
    ),
    _own(
        "heads-back-to-other-positions",
        "features/own_gdn/heads.py",
        "x[0].index_select(0, self._view)",
        "x[0].index_select(0, self._order)",
        _OWN_CP,
    ),
    _own(
        "the-first-channels-everywhere",
        "features/own_gdn/heads.py",
        "weight.chunk(group.size())[group.rank()]",
        "weight.chunk(group.size())[0]",
        _OWN_CP,
    ),
    _own(
        "channels-without-gradient",
        "features/own_gdn/heads.py",
        "weight.chunk(group.size())[group.rank()]",
        "weight.detach().chunk(group.size())[group.rank()]",
        _OWN_CP,
    ),
    _own(
        "gradients-of-heads-stay",
        "features/own_gdn/heads.py",
        "with_backward(self._divide, self._join, x)",
        "with_backward(self._divide, lambda g: g.view(x.shape), x)",
        _OWN_CP,
    ),
    _own(
        "states-between-ranks",
        "features/own_gdn/layer.py",
        "**{_RULE: rule, CONTEXT: lambda *_: None})",
        "**{_RULE: rule})",
        _OWN_CP,
    ),
    _own(
        "positions-moved-twice",
        "features/own_gdn/layer.py",
        "rebound(module.forward, **dict.fromkeys(MOVES, _stays))",
        "module.forward",
        _OWN_CP,
    ),
    _own(
        "work-of-one-rank",
        "features/own_gdn/kind.py",
        "super().work(config).products * config.tensor_model_parallel_size)",
        "super().work(config).products)",
        f"{_OWN}\n{_OWN_RANKS}",
    ),
    _own(
        "payload-of-a-part",
        "features/own_gdn/kind.py",
        "sharding._replace(tp=1)",
        "sharding",
        _OWN_RANKS,
    ),
    _own(
        "modules-that-read-more",
        "features/own_gdn/kind.py",
        '_names(type(module), "hf_forward") == _AROUND',
        '_names(type(module), "hf_forward") >= _AROUND',
    ),
    _own(
        "overridden-methods-not-seen",
        "features/own_gdn/kind.py",
        "return module if all(owner(*method) for method in own) else None",
        "return module",
    ),
)

# A trainer's own sparse attention ---------------------------------------------------------------

_OWN_SPARSE = "tests/core/alignment/test_sparse.py -k own\ntests/test_cases.py -k 'own and sparse'"
_OWN_SPARSE_RANKS = (
    "tests/test_cases_on_ranks.py -k 'stock_schedules_step and cp2 and not cp2_ and not tp2'"
)
_own_sparse = _area("own-dsa", _OWN_SPARSE)
_LAYER = "features/own_dsa/layer.py"
_replaying = _area("own-replay", "benchmarks/trainers/test_own_sparse.py -k choices")
_OWN_DSA = (
    _own_sparse(
        "keys-of-later-queries",
        _LAYER,
        "run.rows[: len(run.rows) - (run.stop - stop)]",
        "run.rows",
    ),
    _own_sparse(
        "own-key-unseen",
        _LAYER,
        "torch.zeros_like(last), last + 1, topk",
        "torch.zeros_like(last), last.clamp(min=1), topk",
    ),
    _own_sparse(
        "one-row-too-few",
        _LAYER,
        "return places.masked_fill(best < 0, -1)",
        "return places.masked_fill(best <= 0, -1)",
    ),
    _own_sparse("rows-that-nobody-chose", _LAYER, "places.masked_fill(best < 0, -1)", "places"),
    _own_sparse(
        "blocks-begin-anew",
        _LAYER,
        "begin, self._begin = self._begin, self._begin + len(query)",
        "begin, self._begin = 0, len(query)",
    ),
    _own_sparse(
        "keys-without-padding", _LAYER, "            if num < topk:", "            if False:"
    ),
    _own_sparse(
        "positions-from-zero",
        _LAYER,
        "self._running.rotary.of(self._rotary, self.view(context).positions)",
        "self._running.rotary.of(self._rotary, torch.arange(len(self.view(context).positions)))",
    ),
    _own_sparse(
        "gradients-from-below-dropped",
        _LAYER,
        "own = (own.to(wider(own.dtype)) + returned).to(own.dtype)",
        "own = own.to(wider(own.dtype)).to(own.dtype)",
    ),
    _own_sparse("gradients-to-above-dropped", _LAYER, "(above, *zeros))", "(above * 0, *zeros))"),
    _own_sparse(
        "choice-forgotten-too-early",
        _LAYER,
        "if held is not None and not self.module.skip_topk:",
        "if held is not None:",
        why="a layer that follows is not among those that have chosen: nothing goes",
    ),
    _own_sparse(
        "choice-not-kept",
        _LAYER,
        'self.module.config.recompute_granularity == "full" and self.module.training',
        "False",
    ),
    _own_sparse(
        "choice-is-never-forgotten",
        _LAYER,
        "            held.pop(self.module.layer_number, None)",
        "            pass",
        why="what layers have chosen only stays in memory, to the end of the step",
    ),
    _own_sparse(
        "last-layer-leaves-nothing",
        _LAYER,
        "        if call.needs_rows_only:\n            query_grad, own =",
        "        if call.needs_rows_only and False:\n            query_grad, own =",
    ),
    _own_sparse(
        "rows-in-the-order-of-ranks",
        _LAYER,
        "return every if order is None else",
        "return every if True else",
        _OWN_SPARSE_RANKS,
    ),
    _own_sparse(
        "gradients-in-the-order-of-positions",
        _LAYER,
        "returned = sent[0] if places is None else",
        "returned = sent[0] if True else",
        _OWN_SPARSE_RANKS,
    ),
    _own_sparse(
        "positions-of-this-rank",
        _LAYER,
        "(positions,) = cache.exchange.gather(context.positions).wait()",
        "positions = context.positions.repeat(size)",
        _OWN_SPARSE_RANKS,
    ),
    _own_sparse(
        "other-calls-not-seen",
        "features/own_dsa/kind.py",
        "called >= _CALLS[method] and called <= _CALLS[method] | _MAY_CALL",
        "called >= _CALLS[method]",
    ),
    _own_sparse(
        "followers-choose",
        "features/own_dsa/kind.py",
        "is_own = module is not None and module.skip_topk is self.follows",
        "is_own = module is not None",
    ),
    _own_sparse(
        "parts-of-a-pack-by-sample",
        "run/calls.py",
        "rows = (sum(self.lengths),) if self.packed else self.lengths",
        "rows = self.lengths",
        "tests/core/run/test_calls.py",
    ),
    _own_sparse(
        "answers-in-the-zig-zag",
        "run/execute/call_outputs.py",
        "CallLayout(lengths, packed, slices=self._slices)",
        "CallLayout(lengths, packed)",
        _OWN_SPARSE_RANKS,
    ),
    _own_sparse(
        "parts-read-as-the-zig-zag",
        "run/read/step.py",
        "return cp_layout.inverse(np.concatenate([np.arange(0), *held]))",
        "return np.concatenate([np.arange(0), *held])",
        _OWN_SPARSE_RANKS,
    ),
    _own_sparse(
        "any-cut-is-taken",
        "features/context_parallel/slices.py",
        "part.kind.slices is not cut",
        "False",
    ),
    _replaying(
        "order-of-places-counts",
        "features/own_dsa/replay.py",
        ".masked_fill(places < 0, 0).sum(1)",
        ".masked_fill(places < 0, 0).cumsum(1).sum(1)",
    ),
    _replaying(
        "last-layer-alone",
        "features/own_dsa/replay.py",
        "total = spread if total is None else total + spread",
        "total = spread",
    ),
    _replaying(
        "layers-alike",
        "features/own_dsa/replay.py",
        "for places, _ in rows]) * module.layer_number",
        "for places, _ in rows])",
    ),
    _replaying(
        "places-in-packs",
        "features/own_dsa/replay.py",
        "        return torch.where(rows < 0, rows, places), positions",
        "        return rows, positions",
    ),
    _replaying(
        "later-positions-not-refused",
        "features/own_dsa/replay.py",
        "    return (places > positions[:, None]).sum() + gaps.sum()",
        "    return gaps.sum()",
    ),
    _replaying(
        "gaps-not-refused",
        "features/own_dsa/replay.py",
        "    return (places > positions[:, None]).sum() + gaps.sum()",
        "    return (places > positions[:, None]).sum()",
    ),
    _replaying(
        "other-samples-not-refused",
        "features/own_dsa/replay.py",
        ".masked_fill(rows < starts[:, None], len(entry))",
        "",
    ),
    _replaying(
        "wrong-choices-of-another-stage",
        "features/own_dsa/replay.py",
        "        if numbers[-1]:",
        "        if num_wrong:",
    ),
    _replaying(
        "a-stage-that-chooses-nothing",
        "features/own_dsa/replay.py",
        "        if self.rank.groups.pp.size() > 1 and not any(self._modules):",
        "        if None:",
    ),
    _replaying(
        "record-not-refused",
        "features/own_dsa/replay.py",
        "        if call is not None and call.action == RECORD:",
        "        if None:",
    ),
    _replaying(
        "passes-not-refused",
        "features/own_dsa/replay.py",
        "        if self._entries and self.rank.forward_only:",
        "        if None:",
    ),
    _replaying(
        "other-numbers-not-refused",
        "features/own_dsa/replay.py",
        "            if [*map(len, entries)] != [sum(layout.lengths) for layout in every]:",
        "            if None:",
    ),
    _replaying(
        "context-parallelism-not-refused",
        "features/own_dsa/replay.py",
        "        if self.rank.groups.cp.size() > 1:",
        "        if None:",
    ),
    _replaying(
        "another-rollout",
        "features/own_dsa/replay.py",
        "rows = entries[microbatch][begin + span.start : begin + span.end]",
        "rows = entries[microbatch][span.start : span.end]",
    ),
    _replaying(
        "rows-of-the-pack-followed",
        "features/own_dsa/replay.py",
        "            parts.append(torch.where(rows < 0, rows, rows - begin))",
        "            parts.append(rows)",
    ),
    _replaying(
        "no-rows-of-padding",
        "features/own_dsa/replay.py",
        "            parts.append(rows.new_full((span.padded - span.length, rows.shape[1]), -1))",
        "            pass",
    ),
    _replaying(
        "queues-left",
        "features/own_dsa/replay.py",
        "            self._queue(module).passed(len(entries)",
        "            self._queue(module).passed(0",
    ),
    _replaying(
        "kept-behind-a-step",
        "features/own_dsa/replay.py",
        '        """See StepPart."""\n        self._forest = None',
        '        """See StepPart."""',
    ),
    _replaying(
        "blind-queries-see-nothing",
        "features/own_dsa/layer.py",
        "    best = torch.where((best < 0).all(1, keepdim=True), first.to(best.dtype), best)\n",
        "",
    ),
)

# DeepSeek's sparse attention -----------------------------------------------------------------

_SPARSE = "tests/core/alignment/test_sparse.py\ntests/test_cases.py -k dsa"
_sparse = _area("dsa", _SPARSE)
_indexer_loss = _area(
    "indexer-loss",
    "tests/core/alignment/test_sparse.py -k indexers_loss\ntests/test_cases.py -k 'dsa and loss'",
)
_DSA_LOSS = "features/dsa/loss.py"
_DSA = (
    _sparse(
        "own-key-hidden",
        "features/dsa/chosen.py",
        "return places <= places[keys - num :, None]",
        "return places < places[keys - num :, None].clamp(min=1)",
    ),
    _sparse(
        "chosen-behind-the-query",
        "features/dsa/chosen.py",
        "return torch.zeros_like(visible).scatter_(1, chosen.long(), True) & visible",
        "return torch.zeros_like(visible).scatter_(1, chosen.long(), True)",
    ),
    _sparse(
        "keys-of-later-queries",
        "features/dsa/visible.py",
        "result.append(VisibleKeys(begin, end, rows[: len(rows) - (stop - end)]))",
        "result.append(VisibleKeys(begin, end, rows))",
    ),
    _sparse(
        "keys-of-other-prompts",
        "features/dsa/visible.py",
        "            if run.first <= first and stop <= run.stop:",
        "            if run.first <= first:",
    ),
    _sparse(
        "last-key-of-the-prompt-unseen",
        "features/dsa/visible.py",
        "rows.append(np.arange(at, at + run.end - run.start))",
        "rows.append(np.arange(at, at + run.end - run.start - 1))",
    ),
    _sparse(
        "sums-in-half-precision",
        "features/dsa/sparse.py",
        "torch.zeros_like(tensor, dtype=wider(tensor.dtype))",
        "torch.zeros_like(tensor)",
        why="models of the tests compute in fp64, where both are the same",
    ),
    _sparse(
        "scores-in-half-precision",
        "features/dsa/chosen.py",
        "wide = wider(index.query.dtype)",
        "wide = index.query.dtype",
    ),
    _sparse(
        "gradients-from-below-dropped",
        "features/dsa/sparse.py",
        "            shared.returned(context, sent_back, own)",
        "            pass",
    ),
    _sparse(
        "gradients-to-above-dropped",
        "features/dsa/sparse.py",
        "            context.cache.add(layer, context.index, level, key_gradients)",
        "            pass",
    ),
    _sparse(
        "weights-of-the-last-level",
        "features/dsa/sparse.py",
        "of_weights = [*map(sum_of, of_weights, more_of)]",
        "of_weights = [*more_of]",
    ),
    _sparse(
        "scores-below-zero-count",
        "features/dsa/chosen.py",
        "return ((scores.relu() if has_relu else scores)",
        "return ((scores)",
    ),
    _sparse(
        "heads-without-weights",
        "features/dsa/chosen.py",
        " * index.weight.unsqueeze(-1)).sum(1)",
        ").sum(1)",
    ),
    _sparse(
        "one-key-too-few",
        "features/dsa/chosen.py",
        "num = min(topk, scores.shape[1])",
        "num = min(max(1, topk - 1), scores.shape[1])",
    ),
    _sparse(
        "ties-everywhere",
        "features/dsa/chosen.py",
        "tied = ((scores >= last).sum(-1) > num)",
        "tied = ((scores >= last).sum(-1) >= num)",
    ),
    _sparse(
        "indexer-counts-from-zero",
        "features/dsa/sparse.py",
        '        yield rotary, "forward", self.angles(rotary, rotary.forward)\n',
        "",
    ),
    _sparse(
        "index-keys-of-the-position-before",
        "features/dsa/sparse.py",
        'context.between["index keys", number] = index.key',
        'context.between["index keys", number] = index.key.roll(1, 0)',
    ),
    _sparse(
        "backward-with-another-scale",
        "features/dsa/chosen.py",
        "        out = attend(leaves[0], leaves[1], leaves[2], is_visible, scale)",
        "        out = attend(leaves[0], leaves[1], leaves[2], is_visible, 1.0)",
    ),
    _sparse(
        "indexer-without-zeros",
        "features/dsa/sparse.py",
        "        zeros = (out_grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.indexer)",
        "        zeros = (None for _ in ctx.indexer)",
    ),
    _indexer_loss(
        "tails-left-out",
        "features/dsa/kind.py",
        "return has_indexer_loss(config)",
        "return False",
    ),
    _indexer_loss(
        "rows-count-once",
        _DSA_LOSS,
        "by_span.index_add_(0, tokens.span, self._weights[tokens.rollout])",
        "by_span[tokens.span] = self._weights[tokens.rollout]",
    ),
    _indexer_loss(
        "sum-for-mean",
        _DSA_LOSS,
        "rows = [1 if is_sum else tokens.num_tokens[number]",
        "rows = [1 if True else tokens.num_tokens[number]",
    ),
    _indexer_loss(
        "first-rows-alone",
        _DSA_LOSS,
        "self._losses[core] = loss + self._losses[core] if core in self._losses else loss",
        "self._losses.setdefault(core, loss)",
    ),
    _indexer_loss(
        "target-of-one-head",
        _DSA_LOSS,
        'float("-inf")), dim=-1).sum(0)',
        'float("-inf")), dim=-1)[0]',
    ),
    _indexer_loss(
        "target-of-this-ranks-heads",
        _DSA_LOSS,
        "        dist.all_reduce(total, group=group)",
        "        pass",
        tests="tests/test_cases_on_ranks.py -k 'step and tp2_sp'",
    ),
    _indexer_loss(
        "hidden-keys-predicted",
        _DSA_LOSS,
        '    scores = scores.masked_fill(hidden, float("-inf"))',
        "    scores = scores + 0",
    ),
    _indexer_loss(
        "loss-not-logged",
        _DSA_LOSS,
        "        for core, loss in self._losses.items():",
        "        for core, loss in ():",
    ),
    _indexer_loss(
        "dense-for-sparse",
        "features/dsa/sparse.py",
        "is_visible = mask_of(picked, keys) if is_sparse else",
        "is_visible = mask_of(picked, keys) if not is_sparse else",
    ),
    _indexer_loss(
        "scale-kept",
        "features/dsa/sparse.py",
        "        scale: float = self._core.softmax_scale",
        '        scale: float = vars(self).setdefault("s", self._core.softmax_scale)',
        tests="tests/core/alignment/test_sparse.py -k change_between_steps",
    ),
    _indexer_loss(
        "topk-kept",
        "features/dsa/sparse.py",
        'most: int = getattr(self._core, "index_topk", self.indexer.index_topk)',
        'most: int = vars(self).setdefault("t", self.indexer.index_topk)',
        tests="tests/core/alignment/test_sparse.py -k change_between_steps",
    ),
    _indexer_loss(
        "kind-of-loss-kept",
        "features/dsa/sparse.py",
        'is_sparse = getattr(self._core.config, "dsa_indexer_use_sparse_loss", False)',
        'is_sparse = vars(self).setdefault("k", self._core.config.dsa_indexer_use_sparse_loss)',
        tests="tests/core/alignment/test_sparse.py -k change_between_steps",
    ),
    _indexer_loss(
        "index-keys-of-ancestors-untrained",
        "features/dsa/sparse.py",
        "key_gradients, more_of = pull((*parts, of_index_keys))",
        "key_gradients, more_of = pull((*parts, torch.zeros_like(of_index_keys)))",
    ),
    _indexer_loss(
        "gradients-of-descendants-dropped",
        "features/dsa/sparse.py",
        "            returned = 0 if sent_back is None else sent_back[2]",
        "            returned = 0",
    ),
    _indexer_loss(
        "no-loss-where-nothing-is-read",
        "features/dsa/sparse.py",
        "            if number == context.keys_only and loss is None:",
        "            if number == context.keys_only:",
    ),
    _indexer_loss(
        "loss-in-evaluation",
        "features/dsa/sparse.py",
        "loss_of(context.parts) if self._core.training else None",
        "loss_of(context.parts)",
        tests="tests/core/alignment/test_sparse.py -k gets_zeros",
    ),
    _indexer_loss(
        "queries-untrained",
        "features/dsa/sparse.py",
        "result.query[first:stop], result.weight[first:stop] = gradients.query, gradients.weight",
        "result.weight[first:stop] = gradients.weight",
    ),
    _indexer_loss(
        "packs-of-some-rows-not-refused",
        _DSA_LOSS,
        '            raise refused(DSA_LOSS, "real_token_mask_q of a pack")',
        "            pass",
    ),
    _indexer_loss(
        "frozen-indexer-not-refused",
        _DSA_LOSS,
        '        if any(".indexer." in name and not weight.requires_grad',
        '        if all(".indexer." in name and not weight.requires_grad',
    ),
    _sparse(
        "context-parallelism-not-refused",
        "features/dsa/kind.py",
        "        if config.context_parallel_size > 1:",
        "        if config.context_parallel_size > 2:",
    ),
    _sparse(
        "payload-without-index-keys",
        "features/dsa/kind.py",
        "values=latents.values + keys.values,",
        "values=latents.values,",
    ),
    _sparse(
        "pairs-of-the-indexer-free",
        "features/dsa/kind.py",
        "pairs=full.pairs + heads * width)",
        "pairs=full.pairs)",
    ),
    _sparse(
        "weights-of-the-indexer-free",
        "features/dsa/kind.py",
        "return super().parameters(config) + weights",
        "return super().parameters(config)",
    ),
)

# Routes that are replayed --------------------------------------------------------------------

_REPLAY = "tests/core/alignment/test_replay.py"
_ROWS = "tests/test_cases.py -k replay"
_QUEUES = "tests/test_cases.py -k 'miles or slime'"
_ROWS_ON_RANKS = (
    "tests/test_cases_on_ranks.py -k 'step and (tp2_sp or cp2 and not cp2_ and not _cp2)'"
)
_TOLD = "tests/core/features/replay/test_told.py"
_READ = "tests/core/run/read/test_samples.py"
_TABLE = "tests/core/features/replay/test_told.py"
_replay = _area("replay", f"{_TOLD}\n{_REPLAY}")
_ROUTES = (
    _replay(
        "spans-without-their-padding",
        "features/replay/segments.py",
        "            offset += span.padded",
        "            offset += span.length",
        _TABLE,
    ),
    _replay(
        "routes-of-the-layer-before",
        "features/replay/segments.py",
        "numbers = local[:, router.layer_number - 1].long()",
        "numbers = local[:, router.layer_number - 2].long()",
        f"{_ROWS}\n{_ROWS_ON_RANKS}",
    ),
    _replay(
        "routes-of-the-first-rank",
        "features/replay/segments.py",
        "routes.chunk(parts)[router.tp_group.rank()]",
        "routes.chunk(parts)[0]",
        f"{_ROWS}\n{_ROWS_ON_RANKS}",
    ),
    _replay(
        "routes-of-the-beginning",
        "features/replay/segments.py",
        "= routes[span.start : span.end]",
        "= routes[: span.length]",
        f"{_ROWS}\n{_ROWS_ON_RANKS}",
    ),
    _replay(
        "marks-are-experts",
        "features/replay/segments.py",
        "return torch.where(numbers < MOST_EXPERTS - MARKS, numbers, numbers - MOST_EXPERTS)",
        "return numbers",
        _TABLE,
    ),
    _replay(
        "offsets-of-all-context-parallel-ranks",
        "features/replay/segments.py",
        "            self._offsets //= size\n",
        "",
        f"{_ROWS}\n{_ROWS_ON_RANKS}",
    ),
    _replay(
        "routes-of-a-buffer-not-cloned",
        "features/replay/told.py",
        "        return self._replace(routes=marked(self.routes))",
        "        return self._replace(routes=self.routes)",
    ),
    _replay(
        "lists-of-backwards-grow",
        "features/replay/told.py",
        "        vars(replay).update({name: [] for name in _LISTS if name in saved})\n",
        "",
        f"{_REPLAY}\n{_TOLD}",
    ),
    _replay(
        "settings-not-put-back",
        "features/replay/told.py",
        "            vars(replay).update(saved)",
        "            pass",
        f"{_REPLAY}\n{_TOLD}",
    ),
    _replay(
        "mask-the-other-way-round",
        "features/replay/told.py",
        "routes.masked_fill(~uses_route.bool(), CHOOSES)",
        "routes.masked_fill(uses_route.bool(), CHOOSES)",
    ),
    _replay(
        "queue-of-the-first-microbatch",
        "features/replay/told.py",
        "self._queue.forward_index + number",
        "self._queue.forward_index",
        _QUEUES,
    ),
    _replay(
        "queue-goes-on-by-one",
        "features/replay/told.py",
        "        self._queue.forward_index += num",
        "        self._queue.forward_index += 1",
        f"{_TOLD}\n{_QUEUES}",
    ),
    _replay(
        "queue-of-backwards-stays",
        "features/replay/told.py",
        "            self._queue.backward_index += num",
        "            pass",
        f"{_TOLD}\n{_ROWS_ON_RANKS}",
    ),
    _replay(
        "lists-of-backwards-stay",
        "features/replay/told.py",
        "                entries.clear()",
        "                pass",
    ),
    _replay(
        "stage-not-put-back",
        "features/replay/told.py",
        "            vars(queue).update(saved)\n            self._stages.set(stage)",
        "            vars(queue).update(saved)",
        f"{_TOLD}\n{_QUEUES}",
    ),
    _replay(
        "rows-in-the-order-of-positions",
        "features/replay/routes.py",
        ".transpose(0, 1).flatten(0, 1)",
        ".flatten(0, 1)",
        _ROWS,
    ),
    _replay(
        "calls-of-sequence-ranks-mixed",
        "features/replay/routes.py",
        "return torch.cat([part for call in range(calls) for part in parts[call::calls]])",
        "return torch.cat(parts)",
        _ROWS_ON_RANKS,
    ),
    _replay(
        "layers-in-the-order-of-stages",
        "features/replay/routes.py",
        "table[:, torch.tensor(layers, device=full.device)] = full",
        "table[:, : len(layers)] = full",
        _READ,
    ),
    _replay(
        "stages-with-their-padding",
        "features/replay/routes.py",
        "by_stage = [part[:, :count] for",
        "by_stage = [part for",
        _READ,
    ),
    _replay(
        "routes-of-the-last-step",
        "features/replay/routes.py",
        "    if len(sources) < len(calls):",
        "    if not sources:",
        _READ,
    ),
    _replay(
        "recording-is-not-refused",
        "features/replay/routes.py",
        "    if any(call.action == RECORD for call in calls):",
        "    if not calls:",
        _READ,
    ),
    _replay(
        "some-calls-without-routes",
        "features/replay/routes.py",
        "        if 0 < len(routed_calls) < len(of_calls):",
        "        if not of_calls:",
        _READ,
    ),
    _replay(
        "routers-of-the-next-layer",
        "features/replay/routes.py",
        "followed[router.layer_number - 1] =",
        "followed[router.layer_number % rank.config.num_layers] =",
        f"{_ROWS}\n{_ROWS_ON_RANKS}",
    ),
)

# Measured bytes ------------------------------------------------------------------------------

_METER = "tests/core/features/measure/test_byte_meter.py"
_bytes = _area("bytes", _METER)
_BYTES = (
    _bytes(
        "numbers-of-two-fits-mixed",
        "features/measure/byte_meter.py",
        "if known is not None and (known.scored < 1) != (scored < 1):  # of a byte",
        "if False:",
        "tests/core/features/measure/test_byte_meter.py",
    ),
    _bytes(
        "what-is-dropped-is-not-kept",
        "features/measure/byte_meter.py",
        "size += self._act * positions * (policy in ON_DEVICE and policy in AGAIN)",
        "size += 0",
    ),
    _bytes(
        "of-a-rank-that-has-least",
        "features/measure/byte_meter.py",
        "max(ratios, default=1.0)",
        "min(ratios, default=1.0)",
    ),
    _bytes(
        "an-old-maximum-is-new",
        "features/measure/byte_meter.py",
        "has_moved = after.allocated > before.allocated and",
        "has_moved =",
    ),
    _bytes(
        "nothing-is-lean-at-first",
        "run/execute/memory_control.py",
        "return (leaner(plan) if is_free and costs.counts else None) or plan, 0.0",
        "return plan, 0.0",
    ),
    _bytes(
        "gradients-of-keys-are-free",
        "plan/memory.py",
        "self._cache += stages.values[of_chunk] * live + stages.gradients[of_chunk] * returned",
        "self._cache += stages.values[of_chunk] * live",
        "tests/core/plan/test_memory_policy.py",
    ),
    _bytes(
        "what-runs-again-is-free",
        "plan/memory.py",
        "again = self._at(segments.again(saved, policy)) * (",
        "again = 0.0 * (",
        "tests/core/plan/test_memory_policy.py",
    ),
)

# What is tried for a plan ------------------------------------------------------------------------

_TREES = "tests/core/tree/test_tree.py"
_plans = _area("plans", "tests/core/plan/test_joint_forest.py")
_PLANS = (
    _plans(
        "over-the-limit-as-before", "plan/step_planner.py",
        "            if not least.over:\n",
        "            if True:\n",
    ),
    _plans(
        "none-runs-less-ahead", "plan/step_planner.py",
        "number, least = min(enumerate(tried), key=lambda pair: pair[1].order)",
        "number, least = 0, first",
    ),
    _plans(
        "waves-before-what-they-read", "tree/packing.py",
        "heapq.merge(self._read, *waves,",
        "heapq.merge(*waves, self._read,",
        _TREES,
    ),
    _plans(
        "places-among-inner-segments", "tree/packing.py",
        "Place(self._places[path[-1].segment], path",
        "Place(path[-1].segment, path",
        _TREES,
    ),
)  # fmt: skip

# One of every other feature -------------------------------------------------------------------

_F = "tests/core/features"
_feature = _area("feature", "tests/test_cases.py")
_FEATURES = (
    _feature(
        "chunk-lengths-slowest", "features/chunk_lengths/chooser.py",
        "return walk(plan, seconds_of(plan, self.cost)), len(plan.segments), chunk_tokens",
        "return -walk(plan, seconds_of(plan, self.cost)), len(plan.segments), chunk_tokens",
        f"{_F}/chunk_lengths/test_chunk_lengths.py",
    ),
    _feature(
        "context-parallel-rows-as-gathered", "features/context_parallel/gathered.py",
        "0, self._exchange.table(segment_order, self._lengths[index], view.device)",
        "0, torch.arange(len(view), device=view.device)",
        "tests/test_cases_on_ranks.py -k 'stock_schedules_step and cp2'",
    ),
    _feature(
        "dealing-counts-first-rollout", "features/dealing/deal.py",
        "= float(after[num - 1]), 0.0, remaining[num:]",
        "= float(after[0]), 0.0, remaining[num:]",
        f"{_F}/dealing/test_deal.py",
    ),
    _feature(
        "areal-parts-not-taken", "features/dealing/areal.py",
        "return own if parts is None or len(parts) != len(own) else parts",
        "return own",
        f"{_F}/dealing/test_hooks.py",
    ),
    _feature(
        "roll-shuffled-parts-as-dealt", "features/dealing/roll.py",
        "return [before[place] for place in range(len(numbers))]",
        "return numbers",
        f"{_F}/dealing/test_hooks.py",
    ),
    _feature(
        "roll-balanced-losses-dealt", "features/dealing/roll.py",
        "(is_balanced and options.get(\"moe_aux_loss_coeff\") != 0)",
        "(is_balanced and options.get(\"moe_aux_loss_coeff\"))",
        f"{_F}/dealing/test_hooks.py",
    ),
    _feature(
        "experts-sums-not-running", "features/experts/ledger.py",
        "            router.ga_steps += 1",
        "            router.ga_steps += 0",
        "tests/test_cases.py -k 'experts and global'",
    ),
    _feature(
        "host-bytes-given-twice", "features/host/pool.py",
        "            slab.give(start, size)",
        "            slab.give(start, 2 * size)",
        f"{_F}/host/test_offload.py",
    ),
    _feature(
        "mla-gradient-not-summed", "features/mla/latent.py",
        "dist.reduce_scatter_tensor(local, returned, group=self._group)",
        "local.copy_(returned[: len(local)])",
        "tests/test_cases_on_ranks.py -k 'stock_schedules_step and tp2_sp'",
    ),
    _feature(
        "mtp-input-of-before", "features/mtp/tables.py",
        "inputs[depth - 1, 1, : len(later)] = np.arange(len(later)) + span.start + depth",
        "inputs[depth - 1, 1, : len(later)] = np.arange(len(later)) + span.start",
        "tests/test_cases.py -k mtp",
    ),
    _feature(
        "mtp-weights-not-moved", "features/mtp/tables.py",
        "        places = self.places[first:] - depth",
        "        places = self.places[first:]",
        "tests/test_cases.py -k mtp",
    ),
    _feature(
        "mtp-weights-of-one-rollout", "features/mtp/tables.py",
        "        counts[:, np.searchsorted(places, part.places)] += part.counts",
        "        counts[:, np.searchsorted(places, part.places)] = part.counts",
        "tests/test_cases.py -k mtp",
    ),
    _feature(
        "mtp-rows-of-all-depths", "features/mtp/tables.py",
        "[rows[:, rows[2] == depth] for rows in heard]",
        "heard",
        "tests/test_cases_across_ranks.py",
    ),
    _feature(
        "mtp-owners-of-one-rank", "features/mtp/tables.py",
        "        for rank in range(1, size):",
        "        for rank in ():",
        "tests/test_cases_on_ranks.py -k cp2",
    ),
    _feature(
        "recurrent-rule-tried-without-gradients", "features/recurrent/probe.py",
        "@torch.inference_mode(False)  # which turns gradients on, too\n", "",
        f"{_F}/recurrent/test_states.py",
    ),
    _feature(
        "mtp-of-several-streams-taken", "features/mtp/methods.py",
        'if getattr(layer, "mhc_enabled", False):', "if False:",
        "tests/core/layers/test_mtp.py -k replaces",
    ),
    _feature(
        "mtp-loss-that-no-call-asks-for", "features/mtp/part.py",
        "self._has_loss = are_run and without is not",
        "self._has_loss = without is not",
        "tests/test_cases.py -k 'mtp and unused'",
    ),
    _feature(
        "mtp-routers-count-what-they-never-see", "features/mtp/part.py",
        "if self.rank.predicts_further and self.rank.model.has_experts and not are_run:",
        "if self.rank.predicts_further and self.rank.model.has_experts and are_run is None:",
        "tests/test_cases.py -k 'mtp and unused'",
    ),
    _feature(
        "overlap-starts-too-soon", "features/overlap/reductions.py",
        "            if entry.chunk != chunk or entry.place < layer:",
        "            if entry.chunk != chunk:",
        "tests/core/alignment/test_overlap.py",
    ),
    _feature(
        "plan-files-of-other-rollouts", "features/plan_files/plan_file.py",
        "            if in_file != in_step:",
        "            if len(in_file) and not len(in_step):",
        f"{_F}/plan_files/test_plan_table.py tests/lab/verify/test_matrix.py",
    ),
    _feature(
        "qat-calibration-unseen", "features/qat/quantisers.py",
        "        if module._if_calib and not module._dynamic:",
        "        if module._if_calib and module._dynamic:",
        "tests/core/alignment/test_quantised.py",
    ),
    _feature(
        "recompute-act-of-a-written-product", "features/recompute_act/activation.py",
        "if product._version != self._version or not _is_apart(activated, product):",
        "if not _is_apart(activated, product):",
        f"{_F}/recompute_act/test_activation.py",
    ),
    _feature(
        "recurrent-tail-of-others-lost", "features/recurrent/states.py",
        "        return gradient, state, tail",
        "        return gradient, state, None",
        "tests/test_cases.py -k 'gdn or mamba'",
    ),
    _feature(
        "totals-counted-twice", "features/totals/around.py",
        "            self.shared += 1",
        "            self.shared += 2",
        f"{_F}/totals/test_totals.py",
    ),
    _feature(
        "verify-lets-pass", "features/verify/judge.py",
        "in worst.items() if units > 1),",
        "in worst.items() if units > 1e30),",
        f"{_F}/verify/test_verify.py",
    ),
    _feature(
        "watch-does-not-remember", "features/watch/around.py",
        "        kind.refusal = copy.copy(agree(refusal, groups, rank.device))",
        "        agree(refusal, groups, rank.device)",
        f"{_F}/watch/test_first_step.py tests/core/alignment/test_schedule_contract.py",
    ),
    _feature(
        "watch-blames-steps-for-calls-beside", "features/watch/first_step.py",
        "if step.state is None else step.state.own():",
        "if step else step.state.own():",
        f"{_F}/watch/test_first_step.py",
    ),
    _feature(
        "watch-misses-what-stays-switched", "features/watch/first_step.py",
        "            for change in step.state.changes(inner=inner)[:1]:",
        "            for change in []:",
        f"{_F}/watch/test_first_step.py",
    ),
    _feature(
        "scales-of-losses-unread", "features/watch/first_step.py",
        "            self._reads_later(function, step)\n",
        "            pass\n",
        f"{_F}/watch/test_first_step.py",
    ),
    _feature(
        "sums-in-an-order-of-each-stage", "plan/timetable.py",
        "if sums and rank == plan.num_ranks - 1 and action",
        "if sums and rank == only and action",
        "tests/lab/plans/test_job.py",
    ),
    _feature(
        "watchdog-at-equal-intervals", "features/watchdog/watchdog.py",
        "            next_s = 2 * seconds",
        "            next_s = seconds + 0.1",
        f"{_F}/watchdog/test_watchdog.py",
    ),
    _feature(
        "windows-one-row-short", "features/windows/windowed.py",
        "        hits = np.flatnonzero(offsets >= 0)",
        "        hits = np.flatnonzero(offsets > 0)",
        "tests/test_cases_on_ranks.py -k 'stock_schedules_step and cp2'",
    ),
)  # fmt: skip


# Versions -------------------------------------------------------------------------------------

_versions = _area("versions", "tests/core/trainers/test_trainers.py -k version")
_ON_MODELS = "tests/core/megatron/test_features.py -k 'taken or versions'"
_VERSIONS = (
    _versions(
        "ranges-have-no-end", "trainers/versions.py", ">={first},<={last or first}", ">={first}",
    ),
    _versions(
        "as-installed-instead-of-imported", "trainers/versions.py",
        'version_of(name.replace("-", "."), name)', 'version_of("", name)',
    ),
    _versions(
        "trainers-that-ran-are-said", "trainers/versions.py",
        'one.version not in ("", *one.tried)', "one.version",
    ),
    _versions(
        "every-rank-says-it", "trainers/versions.py", "if names and is_first_rank():", "if names:",
    ),
    _versions(
        "said-without-the-trainer", "megatron/features.py",
        "versions.warn_untested(trainers.running_trainer())", "versions.warn_untested(None)",
        _ON_MODELS,
    ),
    _versions(
        "slimes-megatron-without-its-commit-alone", "megatron/features.py",
        "Version(release.public) != OF_SLIME", "release != OF_SLIME", _ON_MODELS,
    ),
    _versions(
        "forwards-without-a-signature", "megatron/install.py",
        "functools.wraps(inner.forward)(replacement(inner, inner.forward))",
        "replacement(inner, inner.forward)",
        "tests/core/megatron/test_features.py -k signature",
    ),
    _versions(
        "doctor-says-nothing-of-trainers", "lab/cli/doctor.py",
        "versions.untested(trainers.TRAINERS)", "versions.untested(())",
        "tests/lab/cli/test_doctor.py -k listed_with",
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (
    *_ACROSS, *_FRONTS, *_GRAPHS, *_VISION, *_OWN_GDN, *_OF_KIMI, *_OWN_DSA, *_DSA, *_ROUTES,
    *_BYTES, *_PLANS, *_FEATURES, *_VERSIONS,
)  # fmt: skip
