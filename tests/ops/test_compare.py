"""CompareWithCPU: wrong kernels are found and named, healthy training is silent and undisturbed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from nanny import CompareWithCPU, NanInfTracker, NannyError, open_module_tracker
from ops.op_models import WrongKernel, images, language, optimizer_for, series, train


def compare(**options):
    return CompareWithCPU(strict=True, **options)


def names(tool):
    return [fault.op.rpartition(".")[2] for fault in tool.faults]


@pytest.mark.quick(4)
@pytest.mark.parametrize("make", [language, images, series])
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_healthy_training_has_no_error_and_the_same_losses_and_random_numbers(make, amp, capsys):
    model, x, y = make()
    alone = train(model, x, y, amp=amp)
    drawn = torch.rand(1)
    model, x, y = make()
    with compare() as tool:
        watched = train(model, x, y, amp=amp)
    assert torch.equal(drawn, torch.rand(1))
    assert watched == alone
    assert tool.faults == []
    assert tool.tally.compared > 50
    assert "[ERROR]" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fused", "foreach", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_healthy_optimizers_are_compared_and_silent(kind):
    model, x, y = images()
    with compare(modules=None) as tool:
        train(model, x, y, optimizer=optimizer_for(model, kind))
    assert tool.faults == []
    assert not any("optim" in why or "fused" in why for why in tool.tally.left_out)


def test_healthy_weights_in_bf16_are_silent():
    model, x, y = language()
    with compare() as tool:
        train(model, x, y, low_weights=torch.bfloat16)
    assert tool.faults == []


def test_the_reference_is_wider_than_the_operation():
    with compare() as tool:
        torch.full((1,), 256.0, dtype=torch.bfloat16).index_add_(
            0, torch.zeros(64, dtype=torch.long), torch.full((64,), 0.5).bfloat16()
        )
        torch.full((4,), 300.0, dtype=torch.float16) * 300
    assert names(tool) == ["index_add_", "mul"]
    assert tool.faults[0].gaps[0].worst.value == 256
    assert tool.faults[0].gaps[0].worst.reference == 288
    assert "does not fit into float16" in tool.faults[1].gaps[0].why


def test_the_old_meaning_compares_with_the_same_dtype():
    with compare(reference="cpu_same_dtype") as tool:
        torch.full((4,), 300.0, dtype=torch.float16) * 300
    assert [f.kind for f in tool.faults] == ["inf"]
    with pytest.raises(NannyError, match="'wide'"):
        CompareWithCPU(reference="gpu")


def test_sums_that_stall_in_a_library_kernel_are_errors():
    norm = nn.LayerNorm(8).bfloat16()
    with compare() as tool:
        norm(torch.randn(4096, 8).bfloat16()).sum().backward()
    assert names(tool) == ["native_layer_norm_backward"]
    assert tool.faults[0].place.phase == "backward"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_that_is_two_percent_off_is_found_in_half_precision_too(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(32, 1024).to(dtype), torch.randn(1024, 32).to(dtype)
    with compare() as healthy:
        a @ b
    with WrongKernel("mm", lambda t: t.mul_(1.02)), compare() as wrong:
        a @ b
    assert (names(healthy), names(wrong)) == ([], ["mm"])


def test_an_ill_conditioned_sum_is_no_error():
    torch.manual_seed(0)
    x = torch.randn(4096)
    x = x - x.mean()
    with compare() as tool:
        x.sum()
        x.mean()
        x.bfloat16().sum()
        (x.double() * 0 + 1.0).float().var()
        torch.cat([x * 1e4, -x * 1e4]).sum(0)
    assert tool.faults == []


@pytest.mark.quick(4)
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("addmm", "blocks.0.attn.qkv"),
        ("native_layer_norm", "blocks.0.norm"),
        ("_softmax", "blocks.0.attn"),
        ("relu_", "blocks.0.act"),
    ],
)
def test_a_wrong_kernel_is_named_with_its_module_and_line(name, site, amp):
    model, x, y = language()
    with WrongKernel(name, lambda t: t.mul_(1.05)), open_module_tracker(model), compare() as tool:
        train(model, x, y, steps=1, amp=amp)
    first = tool.faults[0]
    assert (first.op, first.place.site, first.place.phase) == (f"torch.ops.aten.{name}", site, "forward")
    assert first.place.file.endswith("op_models.py")
    assert {f.op for f in tool.faults} == {f"torch.ops.aten.{name}"}
    assert (tool.findings[0].code, tool.findings[0].site) == ("OP_MISMATCH", site)


def test_a_single_wrong_element_of_a_large_product_is_found():
    def spoil(out):
        out[137, 211] += 0.02

    with WrongKernel("mm", spoil), compare() as tool:
        torch.manual_seed(0)
        torch.randn(256, 300) @ torch.randn(300, 256)
    (fault,) = tool.faults
    assert [e.index for e in fault.gaps[0].elements] == [(137, 211)]


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_of_large_factors_is_checked_in_pieces(turned):
    def spoil(out):
        out[400, 7] += 0.05

    torch.manual_seed(0)
    left, right = torch.randn(512, 600), torch.randn(600, 512)
    if turned:
        left, right = left.t().contiguous().t(), right.t().contiguous().t()
    with compare() as tool:
        left @ right
    assert tool.faults == []
    with WrongKernel("mm", spoil), compare() as tool:
        left @ right
    (fault,) = tool.faults
    assert [e.index for e in fault.gaps[0].elements] == [(400, 7)]


@pytest.mark.parametrize(
    ("name", "call"), [("sigmoid", torch.sigmoid), ("mul_", lambda x: x.mul_(0.7)), ("add", lambda x: x + x)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_wrong_element_of_a_large_elementwise_result_is_found(name, call, dtype):
    def spoil(out):
        out[599, 598] += 0.5

    torch.manual_seed(0)
    x = torch.randn(600, 600).to(dtype)
    expected = call(x.clone())
    with compare() as tool:
        seen = call(x.clone())
    assert torch.equal(seen, expected)
    assert tool.faults == []
    with WrongKernel(name, spoil), compare() as tool:
        call(x.clone())
    (fault,) = tool.faults
    assert [e.index for e in fault.gaps[0].elements] == [(599, 598)]


@pytest.mark.parametrize("name", ["mm", "threshold_backward", "native_layer_norm_backward", "embedding_dense_backward"])
def test_a_wrong_kernel_in_backward_is_named_by_its_module(name):
    model, x, y = language()
    with WrongKernel(name, lambda t: t.add_(0.1)), compare() as tool:
        train(model, x, y, steps=1)
    sites = {"mm": "head", "threshold_backward": "blocks.1.act", "native_layer_norm_backward": "blocks.1.norm"}
    assert tool.faults[0].place.site == sites.get(name, "embed")  # embed: its input has no gradient
    assert tool.faults[0].place.phase == "backward"


@pytest.mark.parametrize("kind", [("foreach", "_foreach_addcdiv_"), ("fused", "_fused_adamw_"), ("AdamW", "addcdiv_")])
def test_a_wrong_optimizer_kernel_is_found(kind):
    model, x, y = images()
    with WrongKernel(kind[1], lambda t: t.mul_(0.98)), compare() as tool:
        train(model, x, y, steps=1, optimizer=optimizer_for(model, kind[0]))
    assert names(tool)[0] == kind[1]
    assert tool.faults[0].place.phase == "optimizer"


def test_running_statistics_are_compared():
    bn = nn.BatchNorm1d(4)

    class Wrong(WrongKernel):
        def spoil(self, func, args, out):
            if func.overloadpacket.__name__ == "native_batch_norm":
                args[3].add_(1.0)
            return out

    with Wrong("", None), compare() as tool:
        bn(torch.randn(16, 4))
    assert names(tool) == ["native_batch_norm"]


def test_views_in_place_and_out_arguments_are_right():
    def program():
        x = torch.arange(12.0).reshape(3, 4)
        x[1].mul_(2)
        x.t()[0].add_(x.t()[1])
        torch.add(x, 1, out=torch.empty(3, 4))
        torch.cumsum(x, 0, out=x.clone())
        y = x.clone()
        y[y > 3] = 0.5
        y.index_put_((torch.tensor([0, 0]),), torch.ones(2, 4), accumulate=True)
        torch._foreach_add([x, y], [y, x])
        return y.sum()

    with compare() as tool:
        watched = program()
    assert torch.equal(watched, program())
    assert tool.faults == []
    assert tool.tally.compared >= 8


def test_random_operations_and_uninitialised_memory_are_no_errors():
    with compare() as tool:
        x = torch.randn(100)
        nn.functional.dropout(x)
        x.uniform_()
        x.normal_()
        torch.bernoulli(torch.full((50,), 0.5))
        torch.empty(50)
        torch.multinomial(torch.rand(5), 2)
        torch.randperm(10)
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 4), dropout_p=0.5)
    assert tool.faults == []
    assert tool.tally.left_out["random"] >= 6


def test_infinities_and_nan_that_both_sides_have_are_equal():
    with compare() as tool:
        scores = torch.randn(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf"))
        scores.softmax(-1).sum()
        torch.tensor([float("nan"), 1.0]) + 1
    assert tool.faults == []


def test_a_nan_that_the_reference_makes_too_is_a_warning_not_an_error(capsys):
    with compare() as tool:
        torch.tensor([-1.0, 4.0]).sqrt()
    assert [f.kind for f in tool.faults] == ["nan"]
    said = capsys.readouterr().err
    assert "[WARNING] torch.ops.aten.sqrt(loop)" in said
    assert "[ERROR]" not in said


def test_given_tolerances_are_taken_literally():
    with WrongKernel("exp", lambda t: t.add_(1e-3)):
        with compare(atol=1e-4, rtol=1e-4) as narrow:
            torch.zeros(8).exp()
        with compare(atol=1e-2, rtol=1e-2) as wide:
            torch.zeros(8).exp()
    assert (names(narrow), names(wide)) == (["exp"], [])
    x = torch.linspace(0.1, 1, 50).bfloat16()
    with compare(rtol=1e-3) as narrower_than_the_type, compare(rtol=2.0**-8) as as_wide_as_the_type:
        x.exp()
    assert (names(narrower_than_the_type), names(as_wide_as_the_type)) == (["exp"], [])


def test_twenty_elements_are_shown_and_all_are_counted(capsys):
    with WrongKernel("exp", lambda t: t.add_(1)), compare():
        torch.randn(50, 40).exp()
    said = capsys.readouterr().err
    assert "Too many indices (total 2000) to print" in said
    assert said.count("Element at index") == 21  # and the worst
    assert "Tensor <shape=[50, 40], dtype=float32, device=cpu, size=2000" in said


def test_only_errors_are_logged_unless_asked_for_more(capsys):
    with compare():
        torch.ones(3) + 1
    assert capsys.readouterr().err.count("\n") == 1  # the tally
    with compare(verbose=True, white_list=["torch.ops.aten.mul"]):
        (torch.ones(3) + 1) * 2
    said = capsys.readouterr().err
    assert "step = 0" in said
    assert "torch.ops.aten.add(loop) starts to run ..." in said
    assert "torch.ops.aten.add(loop) succeeds to pass CompareWithCPU test" in said
    assert "torch.ops.aten.mul(loop) is not compared: white list" in said


@pytest.mark.parametrize("spelling", ["torch.ops.aten.exp", "exp", "aten::exp", "aten.exp.default", "ex?", torch.ops.aten.exp])
@pytest.mark.parametrize("argument", ["target_list", "target_op"])
def test_operations_are_selected_by_any_of_their_names(spelling, argument):
    with WrongKernel("exp", lambda t: t.add_(1)), compare(**{argument: [spelling]}) as tool:
        torch.ones(3).exp().add(1)
    assert (names(tool), tool.tally.compared) == (["exp"], 1)


def test_a_misspelt_operation_is_told():
    with pytest.raises(NannyError, match=r"no operation 'torch\.ops\.aten\.admm'"):
        CompareWithCPU(target_list=["torch.ops.aten.admm"])
    with pytest.raises(NannyError, match="two names of one thing"):
        CompareWithCPU(target_list=["mm"], target_op=["mm"])


def test_it_can_be_switched_off():
    with compare(enabled=False) as tool:
        torch.full((4,), 300.0, dtype=torch.float16) * 300
    assert (tool.faults, tool.tally.operations) == ([], 0)


def test_steps_outside_the_window_are_not_watched():
    seen = []
    with compare(start_step=1, end_step=3) as tool:
        for _ in range(5):
            torch.full((4,), 300.0, dtype=torch.float16) * 300
            seen.append(len(tool.faults))
            tool.step()
    assert seen == [0, 1, 2, 2, 2]
    assert [f.step for f in tool.faults] == [1, 2]
    with pytest.raises(NannyError, match="nothing would be watched"):
        CompareWithCPU(start_step=3, end_step=3)


def test_modules_are_selected_by_name():
    model, x, y = language()
    with WrongKernel("addmm", lambda t: t.add_(1)), compare(modules="blocks.1.*") as tool:
        train(model, x, y, steps=1)
    assert {f.place.site for f in tool.faults} == {"blocks.1.attn.qkv", "blocks.1.attn.out", "blocks.1.up", "blocks.1.down"}


def test_a_custom_operation_is_run_again_only_when_named():
    calls = []

    @torch.library.custom_op("nannytest::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        return x * 2

    with compare() as tool:
        scaled(torch.ones(3))
    assert calls == [torch.float32]
    assert any("nannytest" in why for why in tool.tally.left_out)
    with compare(target_list=["torch.ops.nannytest.scaled"]) as tool:
        scaled(torch.ones(3))
    assert calls == [torch.float32, torch.float32, torch.float64]


def test_our_own_trouble_does_not_become_the_programs(monkeypatch):
    monkeypatch.setattr("nanny.ops.compare.results_of", lambda *_: 1 / 0)
    with CompareWithCPU() as tool:
        ones = torch.ones(3)
        with pytest.warns(UserWarning, match="is off now"):
            out = ones + ones
        out = out * 2
    assert out.tolist() == [4, 4, 4]
    assert tool.tally.compared == 0


def test_complex_and_fp8_results_are_compared():
    x = torch.randn(6, dtype=torch.complex64)
    with compare() as tool:
        (x * x).abs()
        torch.fft.fft(x)
        torch.randn(5).to(torch.float8_e4m3fn).float()
    assert tool.faults == []
    with WrongKernel("_fft_c2c", lambda t: t.mul_(1.1)), compare() as tool:
        torch.fft.fft(x)
    assert names(tool) == ["_fft_c2c"]


def factored(a):
    hermitian = a + a.mH
    tall = a[..., : a.shape[-1] - 1]
    torch.linalg.eig(a), torch.linalg.eigvals(a), torch.linalg.eigh(hermitian), torch.linalg.eigh(hermitian, UPLO="U")
    torch.linalg.svd(a), torch.linalg.svd(tall), torch.linalg.svd(tall.mT, full_matrices=False)
    torch.linalg.qr(tall), torch.linalg.qr(a, mode="r"), torch.linalg.qr(tall, mode="complete"), torch.geqrf(tall)
    torch.linalg.lu_factor(a), torch.linalg.lu(tall), torch.linalg.slogdet(a), torch.linalg.det(a), torch.linalg.solve(a, tall)
    equal = torch.eye(a.shape[-1], dtype=a.dtype) * 2  # any basis is one of eigenvectors
    torch.linalg.eigh(equal), torch.linalg.svd(equal), torch.linalg.eig(equal)
    torch.linalg.slogdet(tall @ tall.mH)  # of a singular matrix: rounding decides between -inf and a number


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_factors_that_differ_in_sign_phase_or_basis_are_right(dtype):
    torch.manual_seed(0)
    with compare() as tool:
        for size in (2, 3, 5, 12):
            for _ in range(3):
                factored(torch.randn(size, size, dtype=dtype))
    assert [f for f in tool.faults if f.kind == "mismatch"] == []
    assert not any("not unique" in why for why in tool.tally.left_out)


@pytest.mark.parametrize("name", ["linalg_eig", "_linalg_eigh", "_linalg_svd", "linalg_qr", "geqrf", "linalg_lu", "_linalg_det"])
def test_factors_that_do_not_give_back_their_matrix_are_errors(name):
    torch.manual_seed(0)
    with WrongKernel(name, lambda t: t.mul_(1.01)), compare() as tool:
        factored(torch.randn(5, 5))
    assert {f.op.rpartition(".")[2] for f in tool.faults if f.kind == "mismatch"} == {name}


def test_what_is_not_unique_and_cannot_be_checked_is_said(capsys):
    torch.manual_seed(0)
    with compare() as tool:
        torch.linalg.ldl_factor(torch.randn(6, 6))
        torch.linalg.qr(torch.full((2, 2), float("inf")))
    assert tool.faults == []
    assert tool.tally.left_out["results are not unique (not comparable)"] == 2
    assert "not comparable" in " ".join(capsys.readouterr().err.split())


def test_complex_products_are_compared_and_wrong_ones_are_found():
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 4, dtype=torch.complex64)
    program = (lambda: a @ b, lambda: a.conj() @ b.mH, lambda: torch.addmm(a, a, b, beta=2j), lambda: torch.bmm(a[None], b[None]))
    with compare() as tool:
        for one in program:
            one()
    assert (tool.faults, tool.tally.compared) == ([], 4)
    with WrongKernel("mm", lambda t: t.mul_(1.01)), compare() as tool:
        a @ b
    assert names(tool) == ["mm"]


def test_a_healthy_ctc_loss_is_silent_in_both_tools():
    torch.manual_seed(0)
    for length in (12, 50):
        x = torch.randn(length, 4, 6, requires_grad=True)
        targets, lengths = torch.randint(1, 6, (4, 5)), torch.tensor([length, length - 1, length, 11])
        with compare() as comparing, NanInfTracker(strict=True) as tracker:
            loss = torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, torch.tensor([1, 3, 5, 2]))
            loss.backward()
        assert (comparing.faults, tracker.faults) == ([], [])


@pytest.mark.slow
def test_a_compiled_model_runs_as_without_the_tools():
    def run(*tools):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        compiled, losses = torch.compile(model, backend="aot_eager"), []
        with contextlib.ExitStack() as stack:
            for tool in tools:
                stack.enter_context(tool)
            for _ in range(2):
                loss = compiled(torch.ones(3, 4)).square().sum()
                loss.backward()
                losses.append(loss.item())
        return losses

    tracker, comparing = NanInfTracker(strict=True), compare()
    assert run(tracker, comparing) == run()
    assert (tracker.faults, comparing.faults) == ([], [])
    assert comparing.tally.compared > 10
