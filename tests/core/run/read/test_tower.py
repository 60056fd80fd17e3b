"""A vision tower that runs once an image: rows and gradients of real towers, and what they cost."""

import contextlib
import importlib
import types

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_prefix.errors import UserError
from megatron_prefix.features.vision import models
from megatron_prefix.features.vision.tower import TowerOnce
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.megatron import families
from tests.harness.vision import Kept

SMALL = dict(depth=4, intermediate_size=48, num_heads=2, attn_implementation="sdpa")
WIDE = dict(SMALL, hidden_size=32, out_hidden_size=24)
TOWERS = {
    "Qwen2-VL": (
        "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig",
        dict(SMALL, embed_dim=32, hidden_size=24),
    ),
    "Qwen2.5-VL": (
        "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig",
        dict(WIDE, fullatt_block_indexes=[1, 3]),
    ),
    "Qwen3-VL": (
        "qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig",
        dict(WIDE, deepstack_visual_indexes=[0, 2], num_position_embeddings=64),
    ),
    "Qwen3.5": (
        "qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig",
        dict(WIDE, num_position_embeddings=64),
    ),
    "GLM-4V": ("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", WIDE),
}  # fmt: skip
"""Of transformers: a folder of models, classes of a tower and of its configuration, its fields."""
GRIDS = [(1, 4, 6), (1, 8, 4), (1, 4, 6), (2, 4, 4)]  # the last is a video of two frames
CALLS = [[0, 1], [0, 2, 1], [3, 0], [1, 1]]


def built(name):
    """A small tower in fp64. transformers is imported here: every worker collects this file."""
    folder, made, config, fields = TOWERS[name]
    modeling, configuration = (
        importlib.import_module(f"transformers.models.{folder}.{kind}_{folder}")
        for kind in ("modeling", "configuration")
    )
    torch.manual_seed(0)
    tower = getattr(modeling, made)._from_config(getattr(configuration, config)(**fields)).double()
    for parameter in tower.parameters():
        parameter.data.normal_(0, 0.2)
    stock = tower.forward

    def forward(patches, grid_thw):
        with Kept():  # here: a mode outside is not on in a backward
            return stock(patches, grid_thw=grid_thw)

    tower.forward = forward
    return tower


def step(tower, around=contextlib.nullcontext, waits=False):
    """Rows of all calls, and gradients of a loss of each."""
    config = tower.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    draw = torch.Generator().manual_seed(1)
    grids = [(t if takes_videos(tower) else 1, h, w) for t, h, w in GRIDS]
    pixels = [torch.randn(t * h * w, width, generator=draw).double() for t, h, w in grids]
    tower.zero_grad()
    losses, rows = [], []
    with around() as once:
        if waits:
            once.begin()
        for number, call in enumerate(CALLS):
            global _number
            _number = number
            grid = torch.tensor([grids[i] for i in call])
            found = tower(torch.cat([pixels[i] for i in call]), grid_thw=grid)
            kept = found.pooler_output, getattr(found, "deepstack_features", None)
            leaves = [one for one in pytree.tree_leaves(kept) if isinstance(one, Tensor)]
            weights = [torch.randn(one.shape, generator=draw).double() for one in leaves]
            losses.append(sum((a * b).sum() for a, b in zip(leaves, weights, strict=True)))
            rows += [one.detach() for one in leaves]
        for loss in losses:
            loss.backward()
        if waits:
            once.backward()
    named = tower.named_parameters()
    return rows, {name: one.grad.clone() for name, one in named if one.grad is not None}


_number = 0


def once_around(tower):
    return lambda: TowerOnce(tower, lambda: _number).running()


@contextlib.contextmanager
def frames(tower):
    """Frames that go into the blocks of a tower."""
    seen = []
    stock = tower.forward

    def counting(patches, grid_thw):
        seen.append(int(grid_thw[:, 0].sum()))
        return stock(patches, grid_thw=grid_thw)

    tower.forward = counting
    yield seen
    tower.forward = stock


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("name", list(TOWERS))
def test_rows_and_gradients_are_those_of_a_call(name, waits):
    tower = built(name)
    assert families.forward_owner(tower) in models.TOWERS
    expected, gradients = step(tower)
    with frames(tower) as seen:
        found, own = step(tower, once_around(tower), waits)
    num = sum(len(one) for one in expected)
    limit = tolerance(torch.float64, num)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= limit * float(other.abs().max())
    largest = max(float(one.abs().max()) for one in gradients.values())
    assert own.keys() == gradients.keys() and largest > 0
    for key, one in gradients.items():
        scale = max(float(one.abs().max()), 0.01 * largest)
        assert float((own[key] - one).abs().max()) <= limit * scale, key
    different = 5 if takes_videos(tower) else 4
    assert sum(seen) == (2 * different if waits else 2 * different + 4)


def takes_videos(tower):
    """GLM-4V's are frames already."""
    return "Glm" not in type(tower).__name__


def test_gradients_that_do_not_come_back_are_an_error():
    """Two calls in one microbatch, and a loss of one of them: the tower would never go on."""
    tower = built("Qwen3-VL")
    patches, grid = torch.randn(2, 24, 1536).double(), torch.tensor([[1, 4, 6]])

    before = tower.forward

    def half():
        with once_around(tower)():
            tower(patches[0], grid_thw=grid)
            tower(patches[1], grid_thw=grid).pooler_output.sum().backward()

    with pytest.raises(RuntimeError, match="have not come back"):
        half()
    assert vars(tower)["forward"] is before


class Twice(torch.nn.Module):
    """A tower with two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(2, 2).double() for _ in range(2))

    def forward(self, patches, grid_thw):
        return self.first(patches), None, self.second(patches)


class ByHeight(torch.nn.Module):
    """A tower whose rows depend on an image's height."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)

    def forward(self, patches, grid_thw):
        heights = grid_thw[:, 1].repeat_interleave(grid_thw.prod(-1))
        return (self.first(patches) * heights[:, None],)


def test_the_same_patches_may_be_images_of_two_shapes():
    tower, patches = ByHeight(), torch.randn(4, 2)
    high, wide = torch.tensor([[1, 4, 1]]), torch.tensor([[1, 1, 4]])
    [expected], [other] = tower(patches, grid_thw=high), tower(patches, grid_thw=wide)
    with TowerOnce(tower, lambda: 0).running(), torch.no_grad():
        [found], [last] = tower(patches, grid_thw=high), tower(patches, grid_thw=wide)
    assert torch.equal(found, expected) and torch.equal(last, other)


def test_a_second_attempt_adds_nothing_of_the_first():
    """Gradients of some images have come when a step runs out of memory."""
    tower, patches = ByHeight(), torch.randn(4, 2)
    with TowerOnce(tower, lambda: 0).running() as once:
        [rows] = tower(patches, grid_thw=torch.tensor([[1, 2, 2]]))
        for _ in range(2):
            once.begin()
            (3 * rows.sum()).backward(retain_graph=True)
        once.backward()
    assert tower.first.bias.grad.tolist() == [3 * 2 * 4] * 2


class Pooled(torch.nn.Module):
    """Called as Kimi's: frames of a video are seen together and pooled, and images are listed."""

    def __init__(self, attention="flash_attention_2"):
        super().__init__()
        self.first = torch.nn.Linear(3, 4).double()
        self.config = types.SimpleNamespace(_attn_implementation=attention)
        self.seen = []

    def forward(self, pixel_values, grid_thws):
        self.seen.append(len(grid_thws))
        parts = self.first(pixel_values.flatten(1)).split(grid_thws.prod(-1).tolist())
        grids = grid_thws.tolist()
        merged = [
            (one + one.mean(0)).tanh().view(t, h // 2, 2, w // 2, 2, -1).mean(0)
            for one, (t, h, w) in zip(parts, grids, strict=True)
        ]
        return [one.transpose(1, 2).reshape(-1, 4, one.shape[-1]) for one in merged]


Pooled.__module__ = "transformers_modules.of_a_checkpoint.5b8e.modeling_kimi_k25"
Pooled.__qualname__ = "MoonViT3dPretrainedModel"


def pooled_step(tower, once=None):
    """Rows of calls of images and of a video of two frames, and gradients."""
    draw, losses, rows = torch.Generator().manual_seed(1), [], []
    pixels = [torch.randn(t * h * w, 3, 1, 1, generator=draw).double() for t, h, w in GRIDS]
    with trained(tower, once) as gradients:
        for call in CALLS:
            grid = torch.tensor([GRIDS[i] for i in call])
            found = tower(torch.cat([pixels[i] for i in call]), grid)
            assert isinstance(found, list) and len(found) == len(call)
            weights = [torch.randn(one.shape, generator=draw).double() for one in found]
            losses.append(sum((a * b).sum() for a, b in zip(found, weights, strict=True)))
            rows += [one.detach() for one in found]
        sum(losses).backward()
    return rows, gradients


@contextlib.contextmanager
def trained(tower, once):
    """Around all forwards and backwards of a step; gives a list that then has its gradients."""
    gradients = []
    tower.zero_grad()
    if once is not None:
        once.begin()
    yield gradients
    if once is not None:
        once.backward()
    gradients += [one.grad.clone() for one in tower.parameters()]


def test_towers_that_list_their_images():
    torch.manual_seed(0)
    tower = Pooled()
    expected = pooled_step(tower)
    tower.seen.clear()
    with once_around(tower)() as once:
        found = pooled_step(tower, once)
    torch.testing.assert_close(found, expected)
    assert sum(tower.seen) == 2 * len(GRIDS)  # the video is one
    assert models.tower(Pooled("eager")) is None  # there images see one another


def test_patches_that_are_overwritten_are_an_error():
    """All forward steps run before the tower goes on: a buffer for all of them has the last's."""
    tower, grid = Twice(), torch.tensor([[1, 1, 2]])
    buffer, losses = torch.randn(2, 2).double(), []
    with once_around(tower)() as once:
        once.begin()
        for factor in (1, 2):
            losses.append(tower(buffer.mul_(factor), grid_thw=grid)[0].sum())
        sum(losses).backward()
        with pytest.raises(UserError, match="an argument of the vision tower of microbatch"):
            once.backward()


def test_the_tower_runs_again_under_its_own_autocast():
    tower, grid = ByHeight(), torch.tensor([[1, 4, 8]])
    patches, draw = torch.randn(32, 2), torch.randn(32, 2)

    found = []
    for around in (contextlib.nullcontext, once_around(tower)):
        with around() as once, trained(tower, once) as gradients:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                [rows] = tower(patches, grid_thw=grid)
            (rows.float() * draw).sum().backward()
        assert rows.dtype == torch.bfloat16
        found.append(gradients)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_outputs_that_get_one_gradient():
    """Autograd hands the gradient of a sum to both of its terms, as one tensor."""
    tower, gradients = Twice(), []
    patches, grid = torch.randn(2, 2).double(), torch.tensor([[1, 1, 2]])
    for around in (contextlib.nullcontext, once_around(tower)):
        with around() as once, trained(tower, once) as found:
            for factor in (1, 2, 3):
                one, none, other = tower(patches, grid_thw=grid)
                assert none is None
                (factor * (one + other)).sum().backward()
        gradients.append(found)
    torch.testing.assert_close(gradients[1], gradients[0])
