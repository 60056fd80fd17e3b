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
    "Qwen2.5-Omni": (
        "qwen2_5_omni", "Qwen2_5OmniVisionEncoder", "Qwen2_5OmniVisionEncoderConfig",
        dict(WIDE, fullatt_block_indexes=[1, 3]),
    ),
    "Qwen3-Omni": (
        "qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", "Qwen3OmniMoeVisionEncoderConfig",
        dict(WIDE, deepstack_visual_indexes=[0, 2], num_position_embeddings=64),
    ),
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


HEARD = dict(
    num_mel_bins=5, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, d_model=16,
    output_dim=24, attn_implementation="sdpa",
)  # fmt: skip
SOUND = {
    "Qwen2.5-Omni": (
        "qwen2_5_omni", "Qwen2_5OmniAudioEncoder", "Qwen2_5OmniAudioEncoderConfig",
        dict(HEARD, n_window=8),
    ),
    "Qwen3-Omni": (
        "qwen3_omni_moe", "Qwen3OmniMoeAudioEncoder", "Qwen3OmniMoeAudioEncoderConfig",
        dict(HEARD, downsample_hidden_size=8),
    ),
}  # fmt: skip


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
    seen, stock = [], tower.forward

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


def heard_step(tower, once=None):
    """Rows of calls of clips, and gradients; as models have it, the clips one after another."""
    draw, losses, rows = torch.Generator().manual_seed(1), [], []
    clips = [torch.randn(5, frames, generator=draw).double() for frames in (24, 40, 17, 8)]
    with trained(tower, once) as gradients:
        for call in CALLS:
            lengths = torch.tensor([clips[i].shape[1] for i in call])
            joined = torch.cat([clips[i] for i in call], 1)
            derived = {"aftercnn_lens": lengths} if once is None else {}  # newer ones do without
            with Kept():
                found = tower(joined, feature_lens=lengths, **derived).last_hidden_state
            losses.append((found * torch.randn(found.shape, generator=draw).double()).sum())
            rows.append(found.detach())
        sum(losses).backward()
    return rows, gradients


@pytest.mark.parametrize("name", list(SOUND))
def test_clips_of_sound_run_once(name, monkeypatch):
    """In Qwen3-Omni rows depend on the longest chunk of a call; calls of several run as ever."""
    monkeypatch.setitem(TOWERS, name, SOUND[name])
    tower, seen = built(name), []
    tower.forward = type(tower).forward.__get__(tower)
    tower.layers[0].register_forward_pre_hook(lambda _, args, __: seen.append(1), with_kwargs=True)
    expected = heard_step(tower)
    seen.clear()
    with once_around(tower)() as once:
        found = heard_step(tower, once)
    torch.testing.assert_close(found, expected)
    assert len(seen) == {"Qwen2.5-Omni": 2 * 4, "Qwen3-Omni": 3 + 2}[name]


class Pixels(torch.nn.Module):
    """As Nemotron Omni: a method runs two modules, and a video's frames are seen together."""

    def __init__(self):
        super().__init__()
        self.vision_model, self.vision_projection = (torch.nn.Linear(1, 4).double() for _ in "12")
        self.vision_model.temporal_patch_dim, self.patch_dim, self.seen = 2, 2, []

    def _encode_images(self, images, imgs_sizes, vision_packed_seq_params, num_frames):
        assert vision_packed_seq_params is None
        self.seen.append(len(num_frames))
        parts = images.split(list(num_frames))
        sizes = [own[0].tolist() for own in imgs_sizes.split(list(num_frames))]
        rows = [
            self.vision_model(part.mean((0, 1))[:h, :w].reshape(-1, 1) + len(part))
            for part, (h, w) in zip(parts, sizes, strict=True)
        ]
        return torch.cat([one * self.vision_projection.weight.T for one in rows])


Pixels.__module__ = "megatron.bridge.models.nemotron_omni.modeling_nemotron_omni"
Pixels.forward, Pixels.__qualname__ = lambda self: None, "NemotronOmniModel"


def pixels_step(model, once=None):
    """Rows of calls of images and of a video, padded to what else is in the call; and gradients."""
    draw, losses, rows = torch.Generator().manual_seed(1), [], []
    frames, sizes = [1, 1, 2, 2], [(4, 6), (8, 4), (4, 6), (4, 4)]
    pixels = [torch.randn(t, 3, *s, generator=draw).double() for t, s in zip(frames, sizes)]  # noqa: B905
    pixels[2] = pixels[0].repeat(2, 1, 1, 1)  # the same pixels, in another number of frames
    with trained(model, once) as gradients:
        for number, call in enumerate(CALLS):
            padded = [
                torch.nn.functional.pad(pixels[i], (0, 8 - sizes[i][1], 0, 8 - sizes[i][0]))
                for i in call
            ]
            own = torch.tensor([sizes[i] for i in call for _ in range(frames[i])])
            images = torch.cat(padded) + number * (torch.cat(padded) == 0)  # padding of any kind
            found = model._encode_images(images, own, None, [frames[i] for i in call])
            losses.append((found * torch.randn(found.shape, generator=draw).double()).sum())
            rows.append(found.detach())
        sum(losses).backward()
    return rows, gradients


def test_a_method_that_runs_towers_runs_once_an_image():
    torch.manual_seed(0)
    model = Pixels()
    expected = pixels_step(model)
    model.seen.clear()
    with once_around(model)() as once:
        found = pixels_step(model, once)
    torch.testing.assert_close(found, expected)
    assert model.seen == [1] * 2 * len(GRIDS) and "_encode_images" not in vars(model)
    other = dict(images=torch.zeros(2, 3, 4, 4), imgs_sizes=torch.ones(2, 2), num_frames=[1])
    assert models.tower(model).form(model).items(other) is None  # the tower says what is wrong
    model.vision_model.has_cpe = True  # RADIO's positions move in training
    assert models.tower(model) is None
    assert models.tower(model.eval()) is not None


def takes_videos(tower):
    """GLM-4V's are frames already."""
    return "Glm" not in type(tower).__name__


def test_gradients_that_do_not_come_back_are_an_error():
    """Two calls in one microbatch, and a loss of one of them: the tower would never go on."""
    tower = built("Qwen3-VL")
    patches, grid = torch.randn(2, 24, 1536).double(), torch.tensor([[1, 4, 6]])
    before, half = tower.forward, contextlib.ExitStack()
    half.enter_context(once_around(tower)())
    tower(patches[0], grid_thw=grid)
    tower(patches[1], grid_thw=grid).pooler_output.sum().backward()
    with pytest.raises(RuntimeError, match="have not come back"):
        half.close()
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
    gradients += [one.grad.clone() for one in tower.parameters() if one.grad is not None]


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
