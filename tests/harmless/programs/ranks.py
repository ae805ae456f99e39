"""torch.distributed with one process or ranks that do not exist: wrappers that hook modules, parameters and gradients."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ..program import Program, mlp, program

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.optim  # warns when it is first imported, whoever does it
from ..program import batch, sick


@program("ranks_are_threads_of_one_process", "ranks")
def thread_ranks(seed: int) -> Program:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    models = [mlp() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    made = Program(models, [], lambda i: None)
    losses: list[Any] = [[], []]
    made.extra = lambda: losses

    def loop(watch: Any) -> None:
        threaded._install_threaded_pg()
        store = dist.HashStore()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)

        def rank(number: int) -> None:
            dist.init_process_group("threaded", rank=number, world_size=2, store=store)
            try:
                model = models[number]
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                for i in range(4):
                    with watch.step(i) if not number else contextlib.nullcontext():
                        optimizer.zero_grad()
                        value = model(sick(i + number)).mean()
                        value.backward()
                        for p in model.parameters():
                            dist.all_reduce(p.grad)
                        optimizer.step()
                        losses[number].append(value.detach())
            finally:
                dist.destroy_process_group()

        try:
            threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            threaded._uninstall_threaded_pg()

    made.loop = loop
    return made


@contextlib.contextmanager
def _fake_ranks(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@program("eight_ranks_that_do_not_exist", "ranks")
def fake_ranks(seed: int) -> Program:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    made = Program([], [], lambda i: None)

    def loop(watch: Any) -> None:
        with _fake_ranks(8):
            mesh = init_device_mesh("cpu", (8,))
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            another = watch.another(model, optimizer)
            for i in range(4):
                with another.step(i):
                    optimizer.zero_grad()
                    value = model(sick(i)).float().nan_to_num().mean()
                    value.backward()
                    optimizer.step()
                made.see([list(p.shape) for p in model.parameters()])
            another.close()

    made.models = [nn.Linear(1, 1)]
    made.loop = loop
    return made


@program("remote_calls_to_itself", "ranks")
def remote(seed: int) -> Program:
    from torch.distributed import rpc

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/rendezvous", num_worker_threads=2)
        rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
        try:
            for i in range(4):
                with watch.step(i):
                    optimizer.zero_grad()
                    remote = rpc.remote("one", torch.add, args=(sick(i), 1))
                    value = model(remote.to_here()).mean() + rpc.rpc_sync("one", torch.sum, args=(batch(i),))
                    value.backward()
                    optimizer.step()
                made.see(value)
        finally:
            rpc.shutdown()
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name)
            os.unlink("rendezvous") if os.path.exists("rendezvous") else None

    made.loop = loop
    return made


@program("local_steps_averaged_later_and_joined", "ranks")
def local_steps(seed: int) -> Program:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    inner = mlp()
    made = Program([inner], [], lambda i: None)

    def loop(watch: Any) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = nn.parallel.DistributedDataParallel(inner)
            optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.05), PeriodicModelAverager(2))
            with model.join():
                for i in range(5):
                    with watch.step(i):
                        optimizer.zero_grad()
                        value = model(sick(i, 3)).mean()
                        value.backward()
                        optimizer.step()
                    made.see(value)
            del model, optimizer
        finally:
            dist.destroy_process_group()

    made.loop = loop
    return made


_PRECISION: contextvars.ContextVar[torch.dtype] = contextvars.ContextVar("precision", default=torch.float32)


@program("tasks_choose_their_precision_by_context", "ranks")
def tasks(seed: int) -> Program:
    class Chosen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = _PRECISION.get()
            return F.linear(x.to(kind), self.weight.to(kind), self.bias.to(kind)).float()

    model = nn.Sequential(Chosen(8, 8), nn.ReLU(), Chosen(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    async def one(i: int, kind: torch.dtype) -> torch.Tensor:
        _PRECISION.set(kind)
        await asyncio.sleep(0)
        out = await asyncio.to_thread(model, sick(i))
        await asyncio.sleep(0)
        return out.mean()

    async def main(watch: Any) -> None:
        for i in range(4):
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(watch.step(i))
                optimizer.zero_grad()
                async with asyncio.TaskGroup() as group:
                    made_tasks = [group.create_task(one(i, kind)) for kind in (torch.bfloat16, torch.float64, torch.float32)]
                value = sum(task.result() for task in made_tasks)
                await asyncio.to_thread(value.backward)
                optimizer.step()
            made.see(value)

    made.loop = lambda watch: asyncio.run(main(watch))
    return made


@contextlib.contextmanager
def _group() -> Iterator[None]:
    excepthook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.excepthook = excepthook  # torch puts one of its own there and leaves it
    try:
        yield
    finally:
        dist.destroy_process_group()


def _distributed(model: nn.Module, body: Callable[[Program, Any], None], **more: Any) -> Program:
    """`body(made, watch)` inside a process group; nothing is left of the group when the states are compared."""
    made = Program([model], [], lambda i: None, **more)

    def loop(watch: Any) -> None:
        with _group():
            body(made, watch)

    made.loop = loop
    return made


@program("ddp_with_unused_and_no_sync", "distributed")
def ddp(seed: int) -> Program:
    """DistributedDataParallel made after the tool, find_unused_parameters, no_sync accumulation, a communication hook."""
    model = mlp()
    model.add_module("never", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    x = torch.randn(4, 8)
    buckets: list[int] = []

    def body(made: Program, watch: Any) -> None:
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
            buckets.append(bucket.buffer().numel())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer() * 0.5)
            return future

        wrapped.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                with wrapped.no_sync():
                    wrapped(x).mean().backward()
                loss = wrapped(x).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)

    return _distributed(model, body, extra=lambda: buckets)


@program("ddp_static_graph_and_bucket_views", "distributed")
def ddp_static(seed: int) -> Program:
    """DDP with static_graph and gradient_as_bucket_view: gradients are views that must stay the same objects."""
    model = mlp()
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        wrapped = nn.parallel.DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
        other = watch.another(wrapped)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pointers = []
        for i in range(4):
            with watch.step(i), other.step(i):
                optimizer.zero_grad(set_to_none=False)
                loss = wrapped(x).square().mean()
                loss.backward()
                optimizer.step()
                pointers.append([p.grad.data_ptr() for p in model.parameters()])
            made.see([loss, pointers[-1] == pointers[min(2, i)]])
        other.close()

    return _distributed(model, body)


@program("ddp_under_scaler_and_autocast", "distributed")
def ddp_amp(seed: int) -> Program:
    """DDP with SyncBatchNorm-free BatchNorm, buffers broadcast, autocast and a scaler, all made inside the group."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x = torch.randn(6, 8)

    def body(made: Program, watch: Any) -> None:
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = wrapped(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            made.see([loss, scaler.get_scale()])

    return _distributed(model, body)


def _plain_dtensors() -> None:
    from torch.distributed.tensor import DTensor

    DTensor.plain_tensors = lambda self: [self.to_local()]


@program("fully_shard_on_a_mesh_of_one", "distributed")
def fsdp2(seed: int) -> Program:
    """fully_shard of the watched model inside the first step: parameters become DTensors, classes and hooks change."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _plain_dtensors()
        mesh = init_device_mesh("cpu", (1,))
        optimizer: Any = None
        for i in range(3):
            with watch.step(i):
                if optimizer is None:
                    for m in (model[0], model[2]):
                        fully_shard(m, mesh=mesh)
                    fully_shard(model, mesh=mesh)
                    optimizer = torch.optim.SGD(model.parameters(), 0.1)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)
        watch.close()
        for m in model.modules():  # the state of fully_shard hangs on modules under a name that is random in each process
            for name in [name for name in vars(m) if name.startswith("__composable_api")]:
                del vars(m)[name]

    return _distributed(model, body)


@program("fully_shard_before_another_tool", "distributed")
def fsdp2_before(seed: int) -> Program:
    """A second model is fully_sharded in bf16 before a tool of its own sees it, and is clipped and saved while sharded."""
    first = nn.Linear(2, 2)
    x = torch.randn(4, 8)
    model = mlp()

    def body(made: Program, watch: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        _plain_dtensors()
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for m in (model[0], model[2]):
            fully_shard(m, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        other = watch.another(model, optimizer)
        for i in range(3):
            with other.step(i):
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                file = io.BytesIO()
                torch.save(model.state_dict(), file)
            made.see([loss, norm.to_local() if hasattr(norm, "to_local") else norm, list(model.parameters())])
        other.close()

    return _distributed(first, body)


@program("tensor_parallel_linear_layers", "distributed")
def tensor_parallel(seed: int) -> Program:
    """parallelize_module turns weights into DTensors with pre- and post-hooks that redistribute activations."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        _plain_dtensors()
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        other = watch.another(model, optimizer)
        for i in range(3):
            with watch.step(i), other.step(i):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)
        other.close()

    return _distributed(model, body)


@program("dtensor_activations_and_partial_sums", "distributed")
def dtensors(seed: int) -> Program:
    """Modules return DTensors, sharded, replicated and partial, whose reading would need a collective."""

    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mesh: Any) -> Any:
            from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

            y = self.inner(x)
            return [DTensor.from_local(y, mesh, [kind]) for kind in (Shard(0), Replicate(), Partial())]

    model = nn.ModuleList([Out(), nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.debug import CommDebugMode

        mesh = init_device_mesh("cpu", (1,))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                with CommDebugMode() as mode:
                    parts = model[0](x, mesh)
                    y = sum(part.to_local() for part in parts)
                    loss = model[1](y).square().mean()
                    loss.backward()
                optimizer.step()
            made.see([loss, mode.get_total_counts()])

    return _distributed(model, body)


@program("zero_redundancy_optimizer", "distributed")
def zero_optimizer(seed: int) -> Program:
    """ZeroRedundancyOptimizer: step is its own, wraps another optimizer and broadcasts parameters."""
    model = mlp()
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        other = watch.another(model, optimizer)
        for i in range(3):
            with other.step(i):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)
        other.close()
        watch.close()
        made.see([[sorted(vars(optimizer))], [len(m._forward_hooks) for m in model.modules()]])

    return _distributed(model, body)


@program("optimizer_applied_in_backward", "distributed")
def in_backward(seed: int) -> Program:
    """torch.distributed.optim._apply_optimizer_in_backward hangs optimizers on parameters and steps them in hooks."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = mlp()
    x = torch.randn(4, 8)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss, [p.grad is None for p in model.parameters()]

    return Program([model], [], step)


@program("collectives_started_in_gradient_hooks", "distributed")
def collectives(seed: int) -> Program:
    """Gradient hooks start asynchronous all_reduces that are awaited before the optimizer steps; calls are counted."""
    model = mlp()
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        works: list[Any] = []

        def reduce(p: torch.Tensor) -> None:
            works.append(dist.all_reduce(p.grad, async_op=True))

        handles = [p.register_post_accumulate_grad_hook(reduce) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                made.see(len(works))
                while works:
                    works.pop().wait()
                optimizer.step()
                gathered = [None]
                dist.all_gather_object(gathered, float(loss))
            made.see([loss, gathered])
        for handle in handles:
            handle.remove()

    return _distributed(model, body)


@program("pipeline_schedule_of_one_stage", "distributed")
def pipeline(seed: int) -> Program:
    """A pipeline of one stage splits the batch, runs micro-batches and backwards in its own order."""
    model = mlp()
    x, target = torch.randn(4, 8), torch.randn(4, 4)

    def body(made: Program, watch: Any) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                losses: list[torch.Tensor] = []
                out = schedule.step(x, target=target, losses=losses)
                optimizer.step()
            made.see([out, losses])

    return _distributed(model, body)


@program("distributed_checkpoint_inside_step", "distributed")
def distributed_checkpoint(seed: int) -> Program:
    """The distributed checkpoint saves and loads model and optimizer with its helpers inside a step."""
    model = mlp()
    x = torch.randn(4, 8)

    def body(made: Program, watch: Any) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        with tempfile.TemporaryDirectory() as folder:
            for i in range(3):
                with watch.step(i):
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    weights, states = get_state_dict(model, optimizer)
                    if i == 0:
                        dcp.save({"weights": weights, "states": states}, checkpoint_id=folder)
                    else:
                        dcp.load({"weights": weights, "states": states}, checkpoint_id=folder)
                        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
                made.see([loss, sorted(weights)])

    return _distributed(model, body)


@program("checkpoint_wrapper_renames_modules", "distributed")
def checkpoint_wrapper(seed: int) -> Program:
    """apply_activation_checkpointing wraps submodules in mid-run, so that names and parents change."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        if i == 1:
            apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss, [name for name, _ in model.named_parameters()]

    return Program([model], [optimizer], step)


@program("one_group_for_each_step", "distributed")
def group_each_step(seed: int) -> Program:
    """The process group is made and destroyed inside each step, with barrier, broadcast and a reduce_scatter between."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        with _group():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            dist.barrier()
            for p in model.parameters():
                dist.broadcast(p.data, 0)
                dist.all_reduce(p.grad)
            optimizer.step()
        return loss, dist.is_initialized()

    return Program([model], [optimizer], step)
