"""Fourth round: the process around a training: Ctrl-C anywhere, patched clocks, few descriptors, small files, many ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import copy
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import torch
from torch import nn

from ..program import Program, mlp, program, training

NAN = float("nan")
TESTS = str(pathlib.Path(__file__).resolve().parents[2])


def batch(i: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8) * (i + 1)


def _is_foreign(filename: str) -> bool:
    """Neither torch, nor Python, nor these programs: a tool."""
    library = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), TESTS)
    return not filename.startswith((*library, "<"))


def _ctrl_c(number: int, sick: bool) -> None:
    @program(f"fourth_ctrl_c_at_foreign_call_{number}{'_of_a_bad_step' if sick else ''}", "fourth interrupts")
    def ctrl_c(seed: int) -> Program:
        """Ctrl-C arrives while a tool works, or else at the end of the step: it reaches the user, who goes back and on."""
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        notes: list[Any] = []

        def step(i: int) -> Any:
            value = model(batch(i) * (NAN if sick and i == 2 else 1)).square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        made = Program([model], [optimizer], step, extra=lambda: notes)

        def loop(watch: Any) -> None:
            for i in range(5):
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                randoms = torch.get_rng_state()
                left = [number]

                def profile(frame: Any, event: str, arg: Any, left: list[int] = left) -> None:
                    if event == "call" and _is_foreign(frame.f_code.co_filename):
                        left[0] -= 1
                        if left[0] == 0:
                            sys.setprofile(None)
                            raise KeyboardInterrupt("from the keyboard")

                try:
                    with watch.step(i):
                        if i == 2:
                            sys.setprofile(profile)
                        value = step(i)
                        if i == 2:
                            sys.setprofile(None)
                            notes.append("swallowed" if left[0] <= 0 else "it comes now")
                            raise KeyboardInterrupt("from the keyboard")
                    made.see(value)
                except KeyboardInterrupt as error:
                    notes[:] = [str(error)] if "swallowed" not in notes else notes
                    model.load_state_dict(kept[0])
                    optimizer.load_state_dict(kept[1])
                    optimizer.zero_grad()
                    torch.set_rng_state(randoms)
                finally:
                    sys.setprofile(None)

        made.loop = loop
        return made


for _number in (1, 4, 15, 60, 200, 800):
    _ctrl_c(_number, False)
for _number in (30, 300, 3000):
    _ctrl_c(_number, True)


def _around(name: str, theme: str, **patches: Any) -> None:
    """Functions of Python replaced while training, as tools that freeze time or the disk do."""

    @program(name, theme)
    def patched(seed: int) -> Program:
        model = mlp()
        made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=6)

        def loop(watch: Any) -> None:
            before: list[tuple[Any, str, Any]] = []
            try:
                for i in range(6):
                    if i == 1:
                        for path, value in patches.items():
                            space, _, attribute = path.partition("__")
                            thing = sys.modules[space]
                            before.append((thing, attribute, getattr(thing, attribute)))
                            setattr(thing, attribute, value)
                    with watch.step(i):
                        made.see(made.step(i))
                    if i == 4:
                        watch.close()
            finally:
                for thing, attribute, value in before:
                    setattr(thing, attribute, value)

        made.loop = loop
        return made


class _Backwards:
    now = 1e9

    def __call__(self) -> float:
        self.now -= 3600.0
        return self.now


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not in this house")


_around("fourth_time_stands_still", "fourth patches", time__time=lambda: 0.0, time__monotonic=lambda: 0.0,
        time__perf_counter=lambda: 0.0, time__process_time=lambda: 0.0, time__thread_time=lambda: 0.0)  # fmt: skip
_around("fourth_time_runs_backwards", "fourth patches", time__time=_Backwards(), time__monotonic=_Backwards(),
        time__perf_counter=_Backwards(), time__process_time=_Backwards(), time__sleep=_refuse)  # fmt: skip
_around("fourth_time_is_no_number", "fourth patches", time__time=lambda: NAN, time__monotonic=lambda: None,
        time__perf_counter=lambda: "noon", time__process_time=_refuse)  # fmt: skip
_around(
    "fourth_no_disk_for_python", "fourth patches", os__stat=_refuse, os__open=_refuse, os__makedirs=_refuse, os__fsync=_refuse
)
_around("fourth_open_is_refused", "fourth patches", builtins__open=_refuse)
_around(
    "fourth_json_and_random_are_refused", "fourth patches", json__dumps=_refuse, random__random=_refuse, math__isfinite=_refuse
)
_around(
    "fourth_threads_are_refused", "fourth patches", threading__Thread=_refuse, threading__RLock=_refuse, threading__local=_refuse
)
_around(
    "fourth_inspection_is_refused", "fourth patches", sys___getframe=_refuse, inspect__signature=_refuse, gc__get_objects=_refuse
)
_around(
    "fourth_warnings_and_process_are_refused", "fourth patches", warnings__warn=_refuse, os__getpid=_refuse, os__getcwd=_refuse
)


@program("fourth_own_modules_forgotten", "fourth patches")
def forgotten(seed: int) -> Program:
    """Modules of a tool and of the standard library vanish from sys.modules, as reloaders do."""
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        gone: dict[str, Any] = {}
        try:
            for i in range(6):
                if i == 2:
                    for name in list(sys.modules):
                        if name.partition(".")[0] in ("nanny", "sqlite3", "zlib", "struct", "statistics"):
                            gone[name] = sys.modules.pop(name)
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            for name in list(sys.modules):
                if name.partition(".")[0] == "nanny":
                    del sys.modules[name]
            sys.modules.update(gone)

    made.loop = loop
    return made


@program("fourth_strict_numbers", "fourth settings")
def strict_numbers(seed: int) -> Program:
    """numpy raises at everything, integers have few digits, the encoding is ASCII."""
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1e18 if i == 4 else 1)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        digits = sys.get_int_max_str_digits()
        before = np.seterr(all="raise")
        sys.set_int_max_str_digits(640)
        try:
            for i in range(6):
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            np.seterr(**before)
            sys.set_int_max_str_digits(digits)

    made.loop = loop
    return made


@program("fourth_steps_in_contexts_of_their_own", "fourth settings")
def own_contexts(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=5)
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=0)

    def loop(watch: Any) -> None:
        def one(i: int) -> None:
            mark.set(i)
            with watch.step(i):
                made.see(made.step(i))

        for i in range(5):
            context = contextvars.copy_context()
            context.run(one, i)
            made.see(sorted(v for k, v in context.items() if k is mark))

    made.loop = loop
    return made


@program("fourth_no_descriptors_left", "fourth limits")
def no_descriptors(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        try:
            for i in range(6):
                if i == 1:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
                    with contextlib.suppress(OSError):
                        while True:
                            taken.append(os.open(os.devnull, os.O_RDONLY))
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in taken:
                os.close(descriptor)

    made.loop = loop
    return made


@program("fourth_no_descriptors_from_the_start", "fourth limits")
def none_from_start(seed: int) -> Program:
    made = no_descriptors(seed)
    inner = made.loop
    assert inner is not None

    def loop(watch: Any) -> None:
        other = watch.another(made.models[0])
        other.close()
        inner(watch)

    made.loop = loop
    return made


def _file_size(limit: int) -> None:
    @program(f"fourth_files_may_have_{limit}_bytes", "fourth limits")
    def small_files(seed: int) -> Program:
        """A quota: what is written beyond it fails (and sends a signal that Python ignores)."""
        model = mlp()
        made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=8)

        def loop(watch: Any) -> None:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            try:
                for i in range(8):
                    if i == 2:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
                    with watch.step(i):
                        made.see(made.step(i))
                watch.close()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        made.loop = loop
        return made


_file_size(0)
_file_size(70_000)


@program("fourth_right_to_write_is_lost", "fourth limits")
def right_lost(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=8)

    def loop(watch: Any) -> None:
        root = os.geteuid() == 0
        mask = os.umask(0o777)
        try:
            for i in range(8):
                if i == 2:
                    folder = getattr(watch, "output_dir", None)
                    if folder:
                        os.chmod(folder, 0o500)
                    if root:
                        os.seteuid(65534)
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            if root:
                os.seteuid(0)
            os.umask(mask)

    made.loop = loop
    return made


@program("fourth_small_stack_in_a_thread", "fourth limits")
def small_stack(seed: int) -> Program:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.ReLU())])
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        def steps() -> None:
            for i in range(5):
                with watch.step(i):
                    made.see(made.step(i))

        before = threading.stack_size(512 << 10)
        try:
            thread = threading.Thread(target=steps)
            thread.start()
            thread.join()
        finally:
            threading.stack_size(before)

    made.loop = loop
    return made


# threads, signals, children


@program("fourth_forward_backward_and_update_in_three_threads", "fourth threads")
def three_threads(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(3)]
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(5):
            with watch.step(i):
                value = pools[0].submit(lambda i=i: model(batch(i) * (NAN if i == 3 else 1)).square().mean()).result()
                pools[1].submit(value.backward).result()
                pools[2].submit(optimizer.step).result()
                optimizer.zero_grad()
            made.see(value)
        for pool in pools:
            pool.shutdown()

    made.loop = loop
    return made


@program("fourth_signal_handler_trains_another_model", "fourth threads")
def handler_trains(seed: int) -> Program:
    model, other = mlp(), mlp()
    small = torch.optim.SGD(other.parameters(), 0.1)
    notes: list[float] = []

    def handler(*args: Any) -> None:
        small.zero_grad()
        with torch.enable_grad():
            value = other(batch(1)).square().mean()
        value.backward()
        small.step()
        notes.append(float(value.detach()))

    def loss(i: int) -> torch.Tensor:
        x = model[0](batch(i))
        os.kill(os.getpid(), signal.SIGUSR1)
        y = model[2](model[1](x))
        y.register_hook(lambda g: os.kill(os.getpid(), signal.SIGUSR1))
        return y.square().mean()

    made = training(model, loss, steps=4, extra=lambda: [len(notes), list(other.state_dict().values())])

    def loop(watch: Any) -> None:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            for i in range(4):
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            signal.signal(signal.SIGUSR1, before)

    made.loop = loop
    return made


@program("fourth_descriptors_of_a_child", "fourth children")
def child_descriptors(seed: int) -> Program:
    """A command started inside a step inherits nothing of a tool: descriptors, environment, ignored signals."""
    model, notes = mlp(), []  # type: tuple[Any, list[str]]
    code = (
        "import os, signal; print(sorted(os.environ), [f for f in range(3, 200) if os.path.exists(f'/proc/self/fd/{f}')"
        " and 'fd' not in os.readlink(f'/proc/self/fd/{f}')], signal.getsignal(signal.SIGPIPE),"
        " os.nice(0) - os.getpriority(os.PRIO_PROCESS, os.getppid()))"
    )

    def loss(i: int) -> torch.Tensor:
        if i < 2:
            ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], close_fds=False, capture_output=True, text=True)
            notes.append(ended.stdout + ended.stderr)
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: notes)


@program("fourth_forked_child_trains_on_and_reports", "fourth children")
def child_trains(seed: int) -> Program:
    """A fork between backward and update: parent and child take the same step from there."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reports: list[str] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        if i == 1:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    optimizer.step()
                    again = model(batch(2)).square().mean()
                    again.backward()
                    text = json.dumps([float(again.detach()), *[float(p.detach().double().sum()) for p in model.parameters()]])
                except BaseException as error:  # noqa: BLE001
                    text = repr(error)
                os.write(write, text.encode())
                os._exit(0)
            os.close(write)
            with os.fdopen(read) as lines:
                reports.append(lines.read())
            os.waitpid(child, 0)
        optimizer.step()
        return value

    return Program([model], [optimizer], step, extra=lambda: reports)


@program("fourth_random_modules_used_by_nobody_else", "fourth settings")
def quiet_randoms(seed: int) -> Program:
    """Own generators of all kinds, and the global ones, give the same numbers between and inside steps."""
    model = mlp()
    own = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]
    notes: list[float] = []

    def loss(i: int) -> torch.Tensor:
        notes.extend([random.random(), float(np.random.rand()), float(torch.rand(())), own[0].random(), float(own[1].random())])
        notes.append(float(torch.rand((), generator=own[2])))
        if i == 3:
            random.seed(5), np.random.seed(5), torch.manual_seed(5)
        return F_dropout(model(batch(i) * (NAN if i == 4 else 1))).square().mean()

    return training(model, loss, steps=7, extra=lambda: notes)


def F_dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


# processes of their own

_PRELUDE = """
import sys, os
setting, tests = sys.argv[1:3]
sys.path.insert(0, tests)
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
from harmless.program import Unwatched, bits
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
if setting == "plain":
    watch = Unwatched()
else:
    from harmless.harness import Watched
    watch = Watched(setting, [model], [optimizer], None, "logs")
def step(i):
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 32).reshape(4, 8) * (i + 1)
    value = model(x * (float("nan") if i == 3 else 1)).square().mean()
    value.backward()
    if i != 3:
        optimizer.step()
    return value
def told():
    return str([bits(p) for p in model.parameters()])
"""

_ENDS = {
    "without_close": "for i in range(6):\n with watch.step(i): step(i)\nprint(told())",
    "inside_a_step": "for i in range(6):\n with watch.step(i):\n  step(i)\n  if i == 4: print(told()); sys.exit(5)",
    "by_an_error": "for i in range(6):\n with watch.step(i):\n  step(i)\n  if i == 4: print(told()); raise ValueError('the end')",
    "by_sigterm": "import signal\nfor i in range(6):\n with watch.step(i):\n  step(i)\n  if i == 4: print(told(), flush=True); "
    "os.kill(os.getpid(), signal.SIGTERM)",
    "with_handlers_in_order": "import atexit\natexit.register(lambda: print('first', told()))\nfor i in range(6):\n"
    " with watch.step(i): step(i)\natexit.register(lambda: (step(9), print('second', told())))",
    "with_a_daemon": "import threading, time\ndef run():\n while True: time.sleep(0.001)\n"
    "threading.Thread(target=run, daemon=True).start()\nfor i in range(6):\n with watch.step(i): step(i)\n"
    "print(told(), flush=True)",
    "without_standard_streams": "out = open('out.txt', 'w')\nsys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None\n"
    "for n in (0, 1, 2): os.close(n)\nfor i in range(6):\n with watch.step(i): step(i)\nwatch.close()\n"
    "out.write(told())\nout.close()",
    "into_a_broken_pipe": "r, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\nos.dup2(w, 2)\nout = open('out.txt', 'w')\n"
    "for i in range(6):\n with watch.step(i): step(i)\nwatch.close()\nout.write(told())\nout.close()\nos._exit(0)",
    "with_logs_a_file": "watch.close()\nimport shutil\nshutil.rmtree('logs', ignore_errors=True)\nopen('logs', 'w').close()\n"
    "if setting != 'plain': watch = Watched(setting, [model], [optimizer], None, 'logs/deeper')\n"
    "for i in range(6):\n with watch.step(i): step(i)\nprint(told())",
}
_FLAGS = {"with_a_daemon": ["-X", "dev"], "without_close": ["-OO", "-W", "error"], "by_an_error": ["-b", "-u"]}


def _ending(name: str, body: str) -> None:
    @program(f"fourth_ends_{name}", "fourth endings")
    def ending(seed: int) -> Program:
        model = nn.Linear(2, 2)
        notes: list[Any] = []
        made = Program([model], [], lambda i: None, extra=lambda: notes)

        def loop(watch: Any) -> None:
            home = pathlib.Path("alone").resolve()
            home.mkdir()
            (home / "train.py").write_text(_PRELUDE + body)
            ended = subprocess.run(
                [sys.executable, *_FLAGS.get(name, []), "train.py", getattr(watch, "setting", "plain"), TESTS],
                cwd=home, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            out = home / "out.txt"
            told = "ValueError: the end" in ended.stderr.splitlines()  # a tool may add lines of its own
            notes.extend([ended.returncode, ended.stdout, out.read_text() if out.exists() else None, told])
            import shutil

            shutil.rmtree(home, ignore_errors=True)

        made.loop = loop
        return made


for _name, _body in _ENDS.items():
    _ending(_name, _body)
