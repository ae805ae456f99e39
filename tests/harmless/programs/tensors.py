"""Tensors that are not plain dense float tensors, and tensors written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..program import Program, mlp, program, training


class Tagged(torch.Tensor):
    """A subclass by __torch_function__; every call is counted."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NOT_COUNTED:
            Tagged.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


_NOT_COUNTED = {torch.Tensor.__repr__, torch.Tensor.requires_grad.__get__}  # type: ignore[attr-defined]


class Refusing(torch.Tensor):
    """Allows what the model needs and raises at anything else."""

    ALLOWED = frozenset({"linear", "relu", "square", "mean", "backward", "as_subclass", "matmul", "__get__", "__set__"})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in cls.ALLOWED:
            raise TypeError(f"{func} is not for you")
        return super().__torch_function__(func, types, args, kwargs or {})


class Scaled(torch.Tensor):
    """A wrapper by __torch_dispatch__: payload times scale, computed on the payload."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=payload.dtype, requires_grad=payload.requires_grad)

    def __init__(self, payload: torch.Tensor, scale: float) -> None:
        self.payload, self.scale = payload.detach(), scale

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.payload]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.payload * x.scale if isinstance(x, Scaled) else x

        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].payload, args[0].scale)
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Logged(torch.Tensor):
    """A wrapper by __torch_dispatch__ that returns itself, like quantised weights do."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            payload.stride(),
            payload.storage_offset(),
            dtype=payload.dtype,
            requires_grad=payload.requires_grad,
        )

    def __init__(self, payload: torch.Tensor) -> None:
        self.payload = payload.detach()

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.payload]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.payload if isinstance(x, Logged) else x

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor):
            return args[0]
        return tree_map(lambda x: Logged(x) if isinstance(x, torch.Tensor) else x, out)


@program("torch_function_subclass_input", "subclasses")
def function_subclass(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8).as_subclass(Tagged)
    return training(model, lambda i: model(x).square().mean())


@program("torch_function_subclass_counts_calls", "subclasses")
def function_subclass_counts(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8).as_subclass(Tagged)
    Tagged.calls = 0
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        before = Tagged.calls
        inner(i)
        return Tagged.calls - before

    made.step = step
    return made


@program("torch_function_subclass_that_refuses", "subclasses")
def refusing_subclass(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8).as_subclass(Refusing)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> None:
        inner(i)

    made.step = step
    return made


@program("torch_dispatch_subclass_input", "subclasses")
def dispatch_subclass(seed: int) -> Program:
    model = mlp()
    x = Scaled(torch.randn(4, 8), 0.5)
    return training(model, lambda i: model(x).square().mean())


@program("torch_dispatch_subclass_output", "subclasses")
def dispatch_subclass_output(seed: int) -> Program:
    class Wrap(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Logged(x)

    model = nn.Sequential(mlp(), nn.Identity())
    wrap = nn.Sequential(Wrap(), nn.ReLU())
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        wrap(y.detach())
        return y.square().mean()

    made = training(model, loss)
    made.models.append(wrap)
    return made


@program("torch_dispatch_subclass_parameter", "subclasses")
def dispatch_subclass_parameter(seed: int) -> Program:
    model = mlp()
    model[0].weight = nn.Parameter(Logged(model[0].weight.detach()))
    x = torch.randn(4, 8)

    def loss(i: int) -> Any:
        return model(x).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))


@program("parameter_subclass", "subclasses")
def parameter_subclass(seed: int) -> Program:
    class Own(nn.Parameter):
        pass

    model = mlp()
    model[0].weight = Own(model[0].weight.detach().clone())
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


def nested(layout: torch.layout, dtype: torch.dtype) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    parts = [torch.randn(n, 8, dtype=dtype) for n in (2, 5, 3)]

    def loss(i: int) -> torch.Tensor:
        y = model(torch.nested.nested_tensor(parts, layout=layout))
        return torch.cat([part.square().sum().reshape(1) for part in y.unbind()]).sum()

    return training(model, loss, lr_of(model))


def lr_of(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.001)


for _layout in (torch.strided, torch.jagged):
    for _dtype in (torch.float32, torch.bfloat16):

        @program(f"nested_{str(_layout)[6:]}_{str(_dtype)[6:]}", "nested")
        def nested_tensors(seed: int, layout: Any = _layout, dtype: Any = _dtype) -> Program:
            return nested(layout, dtype)


@program("nested_jagged_norm_and_softmax", "nested")
def nested_softmax(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    parts = [torch.randn(n, 8) for n in (2, 5)]

    def loss(i: int) -> torch.Tensor:
        y = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
        return torch.softmax(y, -1).values().square().sum()

    return training(model, loss)


@program("nested_module_output", "nested")
def nested_output(seed: int) -> Program:
    class Pack(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nested.as_nested_tensor([x[:1], x[1:]])

    model = nn.Sequential(nn.Linear(8, 4), Pack())
    x = torch.randn(4, 8)
    return training(model, lambda i: torch.cat(list(model(x).unbind())).square().sum())


@program("sparse_coo_input", "sparse")
def sparse_coo(seed: int) -> Program:
    model = mlp()
    x = (torch.randn(6, 8) * (torch.rand(6, 8) > 0.7)).to_sparse()
    weight = model[0].weight
    return training(model, lambda i: model[2](torch.sparse.mm(x, weight.t())).square().mean())


@program("sparse_csr_input", "sparse")
def sparse_csr(seed: int) -> Program:
    model = mlp()
    x = (torch.randn(6, 8) * (torch.rand(6, 8) > 0.7)).to_sparse_csr()
    return training(model, lambda i: model[2](torch.relu(x @ model[0].weight.t())).square().mean())


@program("sparse_module_output", "sparse")
def sparse_output(seed: int) -> Program:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    class CSR(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach().to_sparse_csr()

    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), Sparse())
    csr = CSR()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        csr(y.to_dense())
        return y.to_dense().square().mean()

    return training(model, loss)


@program("embedding_sparse_gradient", "sparse")
def embedding_sparse(seed: int) -> Program:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4))
    groups = [torch.optim.SparseAdam(model[0].parameters(), 0.01), torch.optim.SGD(model[1].parameters(), 0.01)]
    x = torch.randint(0, 50, (4, 3))

    def step(i: int) -> Any:
        for optimizer in groups:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in groups:
            optimizer.step()
        return loss

    return Program([model], groups, step)


@program("embedding_bag_sparse_uncoalesced", "sparse")
def embedding_bag(seed: int) -> Program:
    model = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    x = torch.randint(0, 20, (30,))
    offsets = torch.tensor([0, 10, 10, 30])
    return training(model, lambda i: model(x, offsets).square().mean(), torch.optim.SGD(model.parameters(), 0.1))


@program("complex_model", "complex")
def complex_model(seed: int) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
            self.inner = nn.Linear(8, 4, dtype=torch.complex64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.fft.fft(x @ self.w).conj())

    model = Model()
    x = torch.randn(4, 8, dtype=torch.complex64)
    return training(model, lambda i: model(x).abs().square().mean(), torch.optim.Adam(model.parameters(), 0.01))


@program("complex_matmul_bf16_autocast", "complex")
def complex_autocast(seed: int) -> Program:
    model = nn.Linear(8, 8)
    w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
    model.register_parameter("w", w)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            return torch.view_as_real(y.to(torch.complex64) @ w).square().mean()

    return training(model, loss)


@program("complex_views_conj_neg_bits", "complex")
def complex_views(seed: int) -> Program:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        z = torch.view_as_complex(model(x).reshape(4, 4, 2))
        return (z.conj().imag * z.real + z.conj().imag).sum()

    return training(model, loss)


@program("quantized_tensors", "quantized")
def quantized(seed: int) -> Program:
    class Quantize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.quantize_per_tensor(x.detach(), 0.1, 10, torch.quint8)

    model = nn.Sequential(nn.Linear(8, 4))
    quantize = Quantize()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        q = quantize(y)
        return (y - q.dequantize()).square().mean()

    made = training(model, loss)
    made.models.append(quantize)
    return made


@program("fake_quantize", "quantized")
def fake_quantize(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    scale = nn.Parameter(torch.tensor([0.1]))
    model.register_parameter("scale", scale)
    zero = torch.tensor([0.0])

    def loss(i: int) -> torch.Tensor:
        y = torch._fake_quantize_learnable_per_tensor_affine(model(x), scale, zero, 0, 255, 1.0)
        return y.square().mean()

    return training(model, loss)


@program("float8_casts", "quantized")
def float8(seed: int) -> Program:
    class Eight(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.detach().to(torch.float8_e4m3fn), x.detach().to(torch.float8_e5m2)

    model, eight = mlp(), Eight()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        a, b = eight(y)
        return (y - a.float() - b.float()).square().mean()

    made = training(model, loss)
    made.models.append(eight)
    made.extra = lambda: None
    return made


@program("integer_and_bool_outputs", "quantized")
def integer_outputs(seed: int) -> Program:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            self.count += 1
            y = self.table(x)
            return y, y > 0, y.argmax(-1).to(torch.uint8), y.detach().to(torch.int16)

    model = Whole()
    x = torch.randint(0, 10, (4,))
    return training(model, lambda i: (model(x)[0] * model(x)[1]).square().mean())


@program("meta_model_beside", "meta")
def meta_beside(seed: int) -> Program:
    model = mlp()
    with torch.device("meta"):
        ghost = mlp()
    model.add_module("ghost", ghost)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        ghost(torch.empty(4, 8, device="meta")).sum().backward()
        return model[2](model[1](model[0](x))).square().mean()

    return training(model, loss, torch.optim.SGD(list(model[0].parameters()) + list(model[2].parameters()), 0.1))


@program("meta_only_training", "meta")
def meta_only(seed: int) -> Program:
    with torch.device("meta"):
        model = mlp()
    return training(model, lambda i: model(torch.empty(4, 8, device="meta")).square().mean())


@program("fake_tensor_mode_inside", "meta")
def fake_mode(seed: int) -> Program:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = model(torch.empty(4, 8)).shape
        return model(x).square().mean() * shape[0]

    return training(model, loss)


@program("relu_in_place_on_module_output", "in place")
def relu_in_place(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.Hardtanh(inplace=True))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("residual_added_in_place", "in place")
def residual_in_place(seed: int) -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y += x
            y.mul_(0.5)
            y.clamp_(-1, 1)
            return y

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("views_written", "in place")
def views_written(seed: int) -> Program:
    class Write(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            board = torch.zeros(4, 12)
            board[:, :4] = self.inner(x)
            board[:, 4:8].copy_(self.inner(x * 2))
            board.narrow(1, 8, 4).add_(board[:, :4])
            board.select(1, 0).zero_()
            board.t()[3].mul_(2)
            return board

    model = nn.Sequential(Write(), nn.Linear(12, 2))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("out_argument", "in place")
def out_argument(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    board = torch.empty(4, 4)
    tiny = torch.empty(0)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        with torch.no_grad():
            torch.mul(y, 2, out=board)
            torch.add(board, 1, out=board)
            torch.cat([board, board], out=tiny.resize_(0))
            torch.mm(board, board, out=board.new_empty(4, 4))
        return (y * board).mean() + tiny.sum()

    made = training(model, loss)
    made.extra = lambda: [board, tiny]
    return made


@program("resize_and_set_storage", "in place")
def resize_set(seed: int) -> Program:
    model = mlp()
    buffer = torch.zeros(4)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            buffer.resize_(4 + i).fill_(float(i))
            buffer.set_(torch.full((3,), float(i)))
            model[0].weight.data = model[0].weight.data.clone()
            model[2].bias.data.untyped_storage()[0] = 7
        return model(x).square().mean() + buffer.sum()

    made = training(model, loss)
    made.extra = lambda: buffer
    return made


@program("weights_written_through_data", "in place")
def data_writes(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
            p.grad.data.zero_()
        return loss

    return Program([model], [], step)


@program("output_overwritten_after_forward", "in place")
def output_overwritten(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            model(x).fill_(float("nan"))
        y = model(x)
        value = y.square().mean()
        return value + y.mul(0).sum().add_(1).sub_(1)

    return training(model, loss)


@program("input_requires_grad_and_is_changed", "in place")
def input_grad(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8, requires_grad=True)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        x.grad = None
        value = inner(i)
        with torch.no_grad():
            x.add_(x.grad.sign(), alpha=0.01)
        return value

    made.step = step
    made.extra = lambda: [x, x.grad]
    return made


@program("expanded_and_overlapping_tensors", "in place")
def expanded(seed: int) -> Program:
    model = mlp()
    x = torch.randn(1, 8).expand(4, 8)
    y = torch.as_strided(torch.randn(20), (4, 8), (2, 1))
    made = training(model, lambda i: model(x + y).square().mean() + model(x).expand(3, 4, 4).mean())
    made.extra = lambda: [x, y]
    return made


@program("zero_size_batch", "sizes")
def zero_batch(seed: int) -> Program:
    model = mlp()
    return training(model, lambda i: model(torch.randn(4 * (i % 2), 8)).sum())


@program("zero_dim_tensors_everywhere", "sizes")
def zero_dim(seed: int) -> Program:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a * x + self.empty.sum()

    model = Scalar()
    x = torch.tensor(2.0)
    return training(model, lambda i: model(x).square())


@program("channels_last_and_double", "sizes")
def channels_last(seed: int) -> Program:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 9, 2)).double()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    return training(model, lambda i: model(x).square().mean())


@program("mkldnn_layout", "sizes")
def mkldnn(seed: int) -> Program:
    class ToDense(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_mkldnn()

    model, dense = mlp(), ToDense()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        return (y - dense(y.detach()).to_dense()).square().mean() + y.square().mean()

    made = training(model, loss)
    made.models.append(dense)
    return made
