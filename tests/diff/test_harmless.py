"""Whatever happens, the model, its inputs and the random state are as before; inputs may have any common shape."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from corpus.architectures import ConvNet, Recurrent
from corpus.asking import network_parts
from torch import nn
from torch.nn import functional as F
from training import HandedOn

import nanny


def snapshot(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: m.training for name, m in model.named_modules()},
        {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()},
        torch.get_rng_state(),
    )


def same(a, b):
    states = a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    grads = all((a[1][k] is None and b[1][k] is None) or torch.equal(a[1][k], b[1][k]) for k in a[1])
    return states and grads and a[2] == b[2] and a[3] == b[3] and torch.equal(a[4], b[4])


@pytest.mark.quick(2)
@pytest.mark.parametrize("policy", ["native", "cuda", "full"])
@pytest.mark.parametrize("training", [True, False])
def test_mode_buffers_gradients_hooks_and_random_state_are_left_as_they_were(policy, training):
    model, x, loss, y = network_parts("convnet")
    model.train(training)
    model.stem[1].eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, data = snapshot(model), x.clone()
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y, policy=policy)
    assert same(before, snapshot(model))
    assert torch.equal(x, data)
    assert report.training == training
    assert all(p.dtype == torch.float32 for p in model.parameters())


class RaisesInHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.second.register_forward_pre_hook(self.refuse)

    def refuse(self, module, args):
        if args[0].dtype != torch.float32:
            raise RuntimeError("no kernel for this type")

    def forward(self, x):
        return self.second(self.bn(self.first(x)))


def test_a_model_that_raises_in_one_precision_only_is_a_result_and_names_the_place():
    model = RaisesInHalf()
    before = snapshot(model)
    report = nanny.auto_diff(model, torch.randn(4, 8), "bf16")
    assert [f.code for f in report.findings] == ["TARGET_RAISES"]
    assert "no kernel for this type" in report.findings[0].message
    assert "raises in bf16" in str(report)
    after = snapshot(model)
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0])
    assert before[3] == after[3]


def test_the_module_that_raises_is_named():
    class Inverse(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x.view(-1, 2, 2)).flatten(1)

    model = nn.Sequential(nn.Linear(4, 4), Inverse())
    report = nanny.auto_diff(model, torch.randn(4, 4), "bf16", policy="full")
    assert (report.failure.site, report.findings[0].site) == ("1", "1")


def test_a_wrong_shape_is_refused_and_leaves_the_model_as_it_was():
    model, x = ConvNet(), torch.randn(2, 5, 12, 12)
    before = snapshot(model)
    with pytest.raises(nanny.NannyError, match="raises in FP32 too"):
        nanny.auto_diff(model, x)
    assert same(before, snapshot(model))


class Mutating(nn.Module):
    """Writes into its input, a buffer, a frozen parameter, a list and a counter: all of it common in healthy code."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.embedding = nn.Embedding(5, 4, max_norm=0.5)
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0
        self.history = []

    def forward(self, x):
        x.add_(1)
        self.calls += 1
        self.seen = self.seen * 0.9
        self.history.append(self.calls)
        with torch.no_grad():
            self.teacher.weight.lerp_(self.linear.weight, 0.1)
        return self.linear(x) - self.teacher(x) + self.embedding(torch.tensor([1, 2, 3]))


def test_a_forward_that_keeps_state_is_undone_and_told_if_it_was_the_input():
    model, x = Mutating(), torch.randn(3, 4)
    before, data, seen = snapshot(model), x.clone(), model.seen
    report = nanny.auto_diff(model, x, "bf16", backward=False)
    assert same(before, snapshot(model))
    assert torch.equal(x, data)
    assert (model.calls, model.history, model.seen is seen) == (0, [], True)
    assert report.notes == ("the forward pass writes into its input; it was put back",)


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_forward_that_changes_its_trained_weights_is_refused_and_leaves_them_as_they_were(how):
    class Clipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if how == "in place":
                with torch.no_grad():
                    self.linear.weight.mul_(1.01)
            else:
                self.linear.weight = nn.Parameter(self.linear.weight * 1.01)
            return self.linear(x)

    model, x = Clipping(), torch.randn(3, 4)
    before = snapshot(model)
    with pytest.raises(nanny.NannyError, match=r"changes the parameter (linear\.)?weight"):
        nanny.auto_diff(model, x)
    assert same(before, snapshot(model))


def test_parametrized_and_normalised_weights_are_no_change_of_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.utils.spectral_norm(nn.Linear(8, 4))
    )
    assert not nanny.auto_diff(model, torch.randn(6, 8)).findings


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y, scale=1.0):
        return {"sum": self.a(x) + self.b(y) * scale, "pair": (self.a(y), None)}


@pytest.mark.parametrize(
    "sample",
    [
        (torch.randn(3, 4), torch.randn(3, 4)),
        {"x": torch.randn(3, 4), "y": torch.randn(3, 4), "scale": 2.0},
        [(torch.randn(3, 4), torch.randn(3, 4)), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}],
    ],
    ids=["tuple", "dict", "batches"],
)
def test_tuples_dicts_and_lists_of_batches_are_accepted(sample):
    report = nanny.auto_diff(TwoInputs(), sample)
    assert report.batches == (2 if isinstance(sample, list) else 1)
    assert not report.findings


def test_a_module_that_is_used_twice_has_two_rows():
    report = nanny.auto_diff(TwoInputs(), (torch.randn(3, 4), torch.randn(3, 4)))
    assert [c.name for c in report.calls] == ["a", "b", "a#1", "(model)"]


def test_the_dtype_in_the_table_is_the_one_that_ran():
    report = nanny.auto_diff(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4), "bf16", policy="cuda")
    assert [c.dtype for c in report.calls] == ["bfloat16", "float32", "float32"]
    report = nanny.auto_diff(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4), "fp16")
    assert [c.dtype for c in report.calls] == ["float16", "float16", "float16"]


def test_values_near_zero_do_not_explode():
    torch.manual_seed(0)
    report = nanny.auto_diff(nn.Linear(512, 512), torch.randn(8, 512), "bf16")
    assert 0.001 < report.outputs[0].error.rel_l2 < 0.005
    assert not report.findings


def test_the_cuda_lists_are_gone_afterwards():
    def softmax_type():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.randn(4, 4).bfloat16().softmax(-1).dtype

    before = softmax_type()
    nanny.auto_diff(nn.Softmax(-1), torch.randn(4, 4), policy="cuda")
    assert softmax_type() == before == torch.bfloat16


def test_precision_is_not_blamed_for_what_the_reference_has_too():
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x - 100)

    report = nanny.auto_diff(nn.Sequential(nn.Linear(4, 4), Log()), torch.randn(3, 4), "bf16")
    assert [(f.code, f.site) for f in report.findings] == [("REFERENCE_NONFINITE", "1")]
    assert "precision is not the cause" in report.findings[0].message


def test_nan_in_the_sample_is_blamed_on_the_data():
    x = torch.randn(3, 4)
    x[1, 2] = torch.nan
    report = nanny.auto_diff(nn.Linear(4, 2), x)
    assert report.culprits == ("data:input",)


def test_sparse_gradients_are_left_out_and_it_is_told():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2)

        def forward(self, ids):
            return self.head(self.table(ids).mean(1))

    report = nanny.auto_diff(Bag(), torch.randint(0, 20, (4, 5)))
    assert not report.findings
    assert "sparse gradients are not compared: table.weight" in report.notes


def test_lazy_layers_and_gradients_inside_forward_get_a_sentence():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(3, 1)

        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)[0]

    with pytest.raises(nanny.NannyError, match="lazy layers"):
        nanny.auto_diff(nn.LazyLinear(4), torch.randn(2, 8))
    with pytest.raises(nanny.NannyError, match="leave out --no-backward"):
        nanny.auto_diff(Force(), torch.randn(2, 3), backward=False)
    assert not nanny.auto_diff(Force(), torch.randn(2, 3)).findings


def test_a_mask_of_minus_infinity_is_no_trouble():
    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -torch.inf)

    model = nn.Sequential(nn.Linear(8, 8), Masked(), nn.Softmax(-1))
    assert not nanny.auto_diff(model, torch.randn(8, 8), "fp16", loss_fn=lambda out: out.square().sum()).findings


def test_a_gradient_below_the_range_of_fp16_is_told_apart_from_one_that_a_scale_saves():
    class Shrink(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.linear, self.factor = nn.Linear(8, 8), factor

        def forward(self, x):
            return self.linear(x)

    def loss(out):
        return out.float().mean() * 1e-7

    model, x = Shrink(1), torch.randn(4, 8)
    assert not [f for f in nanny.auto_diff(model, x, "fp16", loss_fn=loss).findings if f.severity > 1]
    lost = nanny.auto_diff(model, x, "fp16", loss_fn=loss, loss_scale=1.0)
    assert lost.findings[0].code == "GRADIENT_LOST"


def test_routing_that_flips_is_reported_with_its_share():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.Parameter(torch.randn(4, 16))

        def forward(self, x):
            return x * self.experts[(100 + 0.05 * self.gate(x)).topk(1, -1).indices.squeeze(-1)]

    torch.manual_seed(0)
    report = nanny.auto_diff(Router(), torch.randn(256, 16), "bf16")
    flips = [f for f in report.findings if f.code == "DECISION_FLIPS"]
    assert flips[0].value > 0.05
    assert flips[0].evidence == {}
    assert "topk" in flips[0].message


def test_lstm_that_onednn_refuses_is_measured_without_it():
    torch.manual_seed(0)
    model = Recurrent()
    enabled = torch._C._get_mkldnn_enabled()
    report = nanny.auto_diff(model, torch.randint(0, 30, (2, 5)), "bf16")
    assert report.failure is None
    assert torch._C._get_mkldnn_enabled() == enabled


def test_the_report_is_the_same_every_time_although_the_model_draws_random_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    first = nanny.auto_diff(model, x)
    assert first == nanny.auto_diff(model, x)


def test_two_separate_runs_give_the_same_error():
    model, x, loss, y = network_parts("convnet")
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y)
    wide, low = copy.deepcopy(model), copy.deepcopy(model)
    reference = wide(x)
    F.cross_entropy(reference, y).backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = low(x)
        F.cross_entropy(out, y).backward()
    error = ((out.double() - reference.double()).norm() / reference.double().norm()).detach()
    assert report.outputs[0].error.rel_l2 == pytest.approx(float(error), rel=1e-9)
    grads = [(a.grad.double(), b.grad.double()) for a, b in zip(low.parameters(), wide.parameters())]
    total = sum((a - b).square().sum() for a, b in grads).sqrt() / sum(b.square().sum() for _, b in grads).sqrt()
    assert report.total.rel_l2 == pytest.approx(float(total), rel=1e-6)


def test_a_generator_of_the_model_is_put_back():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(0)

        def forward(self, x):
            return self.linear(x) + torch.randn(4, generator=self.generator)

    model = Noisy()
    before = model.generator.get_state()
    report = nanny.auto_diff(model, torch.randn(3, 4))
    assert torch.equal(model.generator.get_state(), before)
    assert not report.findings


@pytest.mark.parametrize("seed", range(6))
def test_a_relu_that_flips_in_a_tiny_healthy_net_is_no_gradient_error(seed):
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(4, 8)
    for dtype in ("bf16", "fp16"):
        assert not [f for f in nanny.auto_diff(model, x, dtype).findings if f.severity > 1]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.jit.script(nn.Linear(4, 2)), "ScriptModule"),
        (nn.Embedding(4, 2), "raises in FP32 too"),
        (lambda x: x, "needs a torch.nn.Module"),
    ],
    ids=["scripted", "wrong type", "function"],
)
def test_what_cannot_be_watched_is_refused(model, sentence):
    with pytest.raises(nanny.NannyError, match=sentence):
        nanny.auto_diff(model, torch.randn(3, 4))


def test_an_empty_batch_has_nothing_to_compare():
    with pytest.raises(nanny.NannyError, match="nothing to compare"):
        nanny.auto_diff(nn.Linear(4, 2), torch.randn(0, 4))


def test_an_interrupt_gives_the_batches_that_are_done():
    class Impatient(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            if len(x) == 3:
                raise KeyboardInterrupt
            return self.linear(x)

    report = nanny.auto_diff(Impatient(), [torch.randn(2, 4), torch.randn(2, 4), torch.randn(3, 4)])
    assert (report.batches, report.partial) == (2, True)
    assert any("interrupted after 2 of 3 batches" in note for note in report.notes)
    with pytest.raises(KeyboardInterrupt):
        nanny.auto_diff(Impatient(), torch.randn(3, 4))


def test_a_backward_that_is_singular_in_fp16_only_is_named():
    class Root(nn.Module):
        def forward(self, x):
            return (x.half() * x.half() * 1e-8 + 0.0).sqrt().float() * 0 + x

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Root(), nn.Linear(8, 2))
    report = nanny.auto_diff(model, torch.randn(4, 8), "fp16")
    assert (report.findings[0].code, report.findings[0].site) == ("GRADIENT_NONFINITE", "2")


def test_a_matmul_that_sums_unlike_magnitudes_is_shown():
    x = torch.randn(16, 32)
    x[:, 5] *= 1e5
    report = nanny.auto_diff(nn.Linear(32, 8), x, "bf16", backward=False)
    assert [(m.site, m.index) for m in report.mixes] == [("", 5)]
    assert "index 5 contributes" in str(report)
    assert not nanny.auto_diff(nn.Linear(32, 8), torch.randn(16, 32), "bf16", backward=False).mixes


def test_convolutions_and_batched_matmuls_of_unlike_magnitudes_are_shown_too():
    x = torch.randn(2, 8, 6, 6)
    x[:, 3] *= 1e5
    report = nanny.auto_diff(nn.Conv2d(8, 4, 3), x, "bf16", backward=False)
    assert [(m.op, m.index) for m in report.mixes] == [("convolution", 3)]

    class Scores(nn.Module):
        def forward(self, q, k):
            return q @ k.transpose(-2, -1)

    q, k = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    k[..., 6] *= 1e5
    report = nanny.auto_diff(Scores(), (q, k), "bf16", backward=False)
    assert [(m.op, m.index) for m in report.mixes] == [("bmm", 6)]


def test_randomness_of_python_and_numpy_is_the_same_in_every_run_and_untouched():
    class Jitter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return (self.linear(x) + 1000) * random.random() * np.random.rand() - 1000

    random.seed(1)
    np.random.seed(1)
    expected = (random.random(), np.random.rand())
    random.seed(1)
    np.random.seed(1)
    model, x = Jitter(), torch.randn(4, 4)
    first = nanny.auto_diff(model, x)
    assert first == nanny.auto_diff(model, x)
    assert (random.random(), np.random.rand()) == expected


def test_a_model_in_trouble_that_cannot_be_run_again_the_same_is_refused():
    class Unseeded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), itertools.count()

        def forward(self, x):
            return (self.linear(x) + 1000) - 1000 + 50 * next(self.calls)

    with pytest.raises(nanny.NannyError, match="another result when it runs again"):
        nanny.auto_diff(Unseeded(), torch.randn(4, 4))


def test_progress_is_told_for_every_module_call():
    told = []
    nanny.auto_diff(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4), backward=False, progress=told.append)
    assert told == [
        "batch 1 of 1: module call 1, the model",
        "batch 1 of 1: module call 2, 0",
        "batch 1 of 1: module call 3, 1",
    ]


def test_the_error_is_located_along_its_dimension():
    class OneChannel(nn.Module):
        def forward(self, x):
            return torch.cat([x[:, :3], (x[:, 3:4] + 3000) - 3000, x[:, 4:]], 1)

    report = nanny.auto_diff(nn.Sequential(nn.Linear(8, 8), OneChannel()), torch.randn(16, 8) * 3, "bf16", backward=False)
    assert report.findings[0].site == "1"
    assert "at index 3 of dimension 1" in report.findings[0].message


def test_every_code_has_a_page():
    from nanny.diff.judge import PAGES
    from nanny.show.pages import all_pages

    assert set(PAGES) <= set(all_pages())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x)
        return HandedOn.apply(hidden, self.unused(hidden))


def test_an_output_that_gets_no_gradient_is_no_trouble():
    report = nanny.auto_diff(TwoHeads(), torch.ones(2, 8), "bf16", loss_fn=lambda out: out[0].float().square().mean())
    assert {g.name for g in report.gradients} >= {"body.weight", "body.bias"}
