"""The precision levels: what the configuration, the catalogue and the device make of them."""

from __future__ import annotations

import typing
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast import build, precision
from pycls_fast.config.run import Precision
from pycls_fast.errors import UserError
from pycls_fast.parallel.precision import ConstantScaler, RanksScaler
from pycls_fast.precision import LEVELS
from tests.factories import assert_same_bits, config_of, make_optimizer

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]


def test_catalogue_and_schema_name_the_same_levels() -> None:
    names = set(typing.get_args(precision.Name))
    assert set(LEVELS) == names == set(typing.get_args(Precision.model_fields["name"].annotation))
    for level in LEVELS.values():
        assert level.scaled == (level.compute == "float16")


class TestKeptInFloat32:
    """These operations, on half-precision input, under the autocast that training uses."""

    OPERATIONS: typing.ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "layer_norm": lambda x: F.layer_norm(x, (8,)),
        "group_norm": lambda x: F.group_norm(x, 2),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "exp": torch.exp,
        "log": lambda x: x.abs().clamp(min=0.5).log(),
        "pow": lambda x: x**2,
        "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4, device=x.device)),
        "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    }

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("name", ["amp_bf16", "amp_fp16", "fp8"])
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_comes_out_in_float32(self, operation: str, name: str, device: torch.device) -> None:
        autocast = build.autocast(config_of(f"precision={name}"), device)
        torch.manual_seed(0)
        leaf = torch.randn(4, 8, device=device, requires_grad=True)
        with autocast():
            half = F.linear(leaf, torch.eye(8, device=device))
            assert half.dtype == (torch.float16 if name == "amp_fp16" else torch.bfloat16)
            out = self.OPERATIONS[operation](half)
        assert out.dtype == torch.float32
        exact = self.OPERATIONS[operation](half.detach().double())
        assert torch.allclose(out.double(), exact, rtol=1e-6, atol=1e-6)
        out.sum().backward()
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()

    def test_powers_of_and_by_tensors(self) -> None:
        autocast = build.autocast(config_of("precision=amp_bf16"), CPU)
        x = torch.full((2,), 1.5, dtype=torch.bfloat16)
        with autocast():
            assert (x**x).dtype == (2.0**x).dtype == torch.float32

    def test_nothing_changes_outside_autocast(self) -> None:
        build.autocast(config_of("precision=amp_bf16"), CPU)
        assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype == torch.bfloat16
        assert torch.ones(2, dtype=torch.float64).exp().dtype == torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.ones(2, dtype=torch.float64).exp().dtype == torch.float64


def test_the_loss_scale_is_as_configured() -> None:
    keys = ("start=1024", "growth=3", "backoff=0.25", "interval=17")
    config = config_of("precision=amp_fp16", *(f"precision.loss_scale_{key}" for key in keys))
    scaler = build.loss_scaler(config, CPU)
    assert type(scaler) is RanksScaler
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (1024, 3)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 17)
    constant = build.loss_scaler(config_of("precision=fp16", "precision.loss_scale=512"), CPU)
    assert type(constant) is ConstantScaler
    assert constant.get_scale() == 512
    assert not build.loss_scaler(config_of("precision=amp_bf16"), CPU).is_enabled()


def one_step(
    monkeypatch: pytest.MonkeyPatch, constant: float | None, gradient: float | None, others: float
) -> typing.Any:
    """(whether the step was made, the scale after it), when another rank's flag is `others`."""
    asked: list[object] = []
    group: typing.Any = object()

    def all_reduce(flag: Tensor, op: object, group: object) -> None:
        asked.append((op, group))
        flag.clamp_(min=others)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    dynamic = {"init_scale": 8.0, "backoff_factor": 0.25}
    scaler = (
        RanksScaler("cpu", ranks=[group], **dynamic)
        if constant is None
        else ConstantScaler("cpu", constant, ranks=[group])
    )
    scaler.scale(torch.ones(()))
    weight.grad = None if gradient is None else torch.tensor(8.0 * gradient)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert asked == [(torch.distributed.ReduceOp.MAX, group)]
    return weight.item() != 0.0, scaler.get_scale()


@pytest.mark.parametrize("saved_after", ["its first step", "no step"])
def test_a_saved_scale_goes_on_under_the_settings_of_now(saved_after: str) -> None:
    """It grows after this scaler's interval, by its factor; the 5 steps of the one before count as far as they can."""
    saved = {"scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}
    scaler = RanksScaler("cpu", init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    if saved_after == "its first step":
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(saved)
    # That of a run without scaling.
    scaler.load_state_dict({})
    assert scaler.get_scale() == 32.0
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales = []
    for gradient in (1.0, 1.0, 1.0, float("inf")):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor(gradient)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [128.0, 128.0, 128.0, 32.0]
    constant = ConstantScaler("cpu", 16.0)
    constant.load_state_dict(saved)
    assert constant.get_scale() == 16.0


@pytest.mark.parametrize(("constant", "lowered"), [(None, 2.0), (8.0, 8.0)])
def test_all_skip_what_one_has_to(monkeypatch: pytest.MonkeyPatch, constant: float | None, lowered: float) -> None:
    assert one_step(monkeypatch, constant, 1.0, 0.0) == (True, 8.0)
    assert one_step(monkeypatch, constant, 1.0, 1.0) == (False, lowered)
    assert one_step(monkeypatch, constant, float("inf"), 0.0) == (False, lowered)


def test_a_rank_without_gradients_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_step(monkeypatch, None, None, 0.0) == (False, 8.0)
    assert one_step(monkeypatch, None, None, 1.0) == (False, 2.0)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_is_skipped_leaves_no_trace(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(300), [torch.full((300,), torch.inf), torch.randn(300), torch.randn(300)]
    ends = []
    for skipped in (False, True):
        # What the allocator gives back is what was there: not a number.
        del_me = [torch.full((300,), torch.nan) for _ in range(8)]
        del del_me
        parameter = nn.Parameter(start.clone())
        groups = [{"params": [parameter], "weight_decay": 0.1}]
        optimizer = make_optimizer(name, groups, lr=0.1, implementation=implementation)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for gradient in gradients if skipped else gradients[1:]:
            # scale() is what makes the scaler's tensors.
            scaler.scale(torch.ones(()))
            parameter.grad = gradient * scaler.get_scale()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append(parameter.detach().clone())
    assert torch.isfinite(ends[1]).all()
    # A power of two scales without rounding.
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("scale", ["dynamic", "512"])
def test_gradients_on_the_host_are_scaled_there(scale: str) -> None:
    """Whatever the device of the loss, for which meta stands: no copy is made from it that somebody has to wait for."""
    config = config_of("precision=amp_fp16", "precision.loss_scale_start=512", f"precision.loss_scale={scale}")
    scaler = build.loss_scaler(config, CPU, on_host=True)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    for gradient, moves in ((torch.inf, False), (512.0, True)):
        assert scaler.scale(torch.ones((), device="meta")).is_meta
        weight.grad = torch.tensor(gradient)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert bool(weight) == moves


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_rounds_products() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    a, b = torch.randn(2, 256, 256, dtype=torch.float64, device=device)
    errors = {}
    for name in ("tf32", "fp32"):
        config = config_of(f"precision={name}")
        build.set_backend(config, device, build.switches(config, device))
        errors[name] = ((a.float() @ b.float()).double() - a @ b).norm().item() / (a @ b).norm().item()
    assert errors["fp32"] < 2e-6 < 1e-4 < errors["tf32"] < 2e-3


EMULATED, SKIP = "precision.fp8_emulate=true", "precision.fp8_skip=[head,blocks.1]"


class TestFloat8:
    @pytest.fixture(autouse=True)
    def torchao(self) -> None:
        pytest.importorskip("torchao")

    def network(self, *overrides: str, depth: int = 2) -> nn.Module:
        network = self.plain(depth)
        assert build.apply_precision(config_of("precision=fp8", *overrides), network, CPU) is None
        return network

    def plain(self, depth: int = 2) -> nn.Module:
        torch.manual_seed(0)
        config = config_of(f"model.depth={depth}", "model.class_token=true")
        network = build.model(config, 10, build.switches(config_of(), CPU))
        for value in network.parameters():
            value.data.add_(torch.randn_like(value) * 0.1)
        return network

    def replaced(self, network: nn.Module) -> set[str]:
        return {name for name, module in network.named_modules() if type(module).__name__ == "Float8Linear"}

    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    def test_what_is_replaced_and_how_much_it_rounds(self, recipe: str) -> None:
        network, plain = self.network(EMULATED, f"precision.fp8_recipe={recipe}", SKIP), self.plain()
        inner = ("attention.query", "attention.key", "attention.value", "attention.projection", "mlp.fc1", "mlp.fc2")
        assert self.replaced(network) == {f"blocks.0.{name}" for name in inner}
        # Checkpoints keep the reference layout.
        assert_same_bits(network.state_dict(), plain.state_dict())
        images, outs, gradients = torch.randn(8, 3, 16, 16), [], []
        for model in (network, plain):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outs.append(model(images).float())
            F.cross_entropy(outs[-1], torch.arange(8)).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for ours, theirs in (outs, gradients):
            # e4m3 has 4 bits of significand: an error of 2^-4 at most per factor, a few per cent over a sum.
            assert 1e-3 < (ours - theirs).norm() / theirs.norm() < 0.3

    def with_skipped(self, skip: str) -> set[str]:
        return self.replaced(self.network(EMULATED, f"precision.fp8_skip=[head,{skip}]", depth=11))

    @pytest.mark.slow
    def test_a_skipped_name_is_that_of_one_module_and_a_pattern_of_several(self) -> None:
        everything = self.with_skipped("pooling")
        assert {name.split(".")[1] for name in everything} == {str(block) for block in range(11)}
        in_second = {name for name in everything if name.startswith("blocks.1.")}
        assert len(in_second) == 6
        assert everything - self.with_skipped("blocks.1") == in_second
        projections = {name for name in everything if name.endswith("attention.projection")}
        assert everything - self.with_skipped("*.projection") == projections

    @pytest.mark.slow
    @pytest.mark.parametrize(("given", "suggested"), [("haed", "head"), ("blocks.99", "blocks.9")])
    def test_a_skipped_name_that_is_not_there_is_refused(self, given: str, suggested: str) -> None:
        with pytest.raises(
            UserError, match=rf"precision.fp8_skip: {given} names nothing .* did you mean {suggested}\?"
        ):
            self.with_skipped(given)

    @pytest.mark.slow
    @pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
    def test_any_number_of_tokens(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The weights' gradient is a product over the tokens, 3 images of 17 here, and CUDA wants multiples of 16."""
        products = []

        def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **named: typing.Any) -> Tensor:
            products.append((*a.shape, b.shape[1]))
            assert all(side % 16 == 0 for side in (a.shape[1], *b.shape))
            out = (a.float() * scale_a) @ (b.float() * scale_b)
            return (out if named["bias"] is None else out + named["bias"]).to(named["out_dtype"])

        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        monkeypatch.setattr("pycls_fast.parallel.precision.need_cuda", lambda *asked: None)
        network, plain = self.network(f"precision.fp8_recipe={recipe}", SKIP), self.plain()
        images, gradients = torch.randn(3, 3, 16, 16), []
        for model in (network, plain):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(images).float().square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert len(products) == 3 * 6
        assert 1e-3 < (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 0.3

    def test_pooling_stays_out(self) -> None:
        """Its query is one token, the inputs of its MLP one for each image."""
        config = config_of("precision=fp8", EMULATED, "model.classifier=map", "speed=reference")
        network = build.model(config, 10, build.switches(config, CPU))
        build.apply_precision(config, network, CPU)
        assert {name.split(".")[0] for name in self.replaced(network)} == {"blocks"}

    @pytest.mark.parametrize(
        ("overrides", "line"),
        [
            ([], r"^precision: fp8 needs CUDA .*amp_bf16"),
            (
                [EMULATED, "precision.fp8_skip=['*']"],
                r"^precision: fp8 found no linear layer .*; use precision=amp_bf16$",
            ),
        ],
    )
    def test_what_has_no_float8(self, overrides: list[str], line: str) -> None:
        with pytest.raises(UserError, match=line):
            self.network(*overrides)
