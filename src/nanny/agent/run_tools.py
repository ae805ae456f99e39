"""What executes the user's code: `nanny diff` and `nanny trace` in a process of their own, only if the server was told so.

The process gets a short list of environment variables, none of which is a secret, and a process group of its own, which ends with
the call: when it is answered, takes too long or is cancelled, and when the server ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from ..core.finding import NannyError
from .folder import ReadableFolder
from .results import OutputResult

LONGEST_OUTPUT = 40_000  # bytes of each stream
TIMEOUT = 600.0
AT_ONCE = 2  # further calls wait: each may need all the memory of a training
PASSED_ON = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TMP", "TEMP", "TZ", "LANG", "LANGUAGE", "TERM", "NO_COLOR",
    "SYSTEMROOT", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONIOENCODING",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_HOME", "HF_HOME", "XDG_CACHE_HOME",
    "NANNY_DISABLE",
))  # fmt: skip


@dataclass(frozen=True)
class RunTools:
    folder: ReadableFolder

    @cached_property
    def _turns(self) -> Any:
        import anyio

        return anyio.Semaphore(AT_ONCE)

    async def diff(
        self,
        model: Annotated[str, "FILE.py or FILE.py:factory below the root; the file is executed"],
        input: Annotated[str, "a file with a sample input, saved by torch.save or as safetensors"],
        dtype: Annotated[Literal["bf16", "fp16"], "the format to compare with FP32"] = "bf16",
        policy: Annotated[Literal["native", "cuda", "cpu", "full"], "whose autocast rules"] = "native",
        timeout: Annotated[float, "seconds"] = TIMEOUT,
    ) -> OutputResult:
        """EXECUTES the user's model file: runs it in FP32 and low precision and says which layer parts, and why."""
        file, colon, factory = model.partition(":")
        words = ["--model", f"{self.folder.path(file)}{colon}{factory}", "--input", str(self.folder.path(input))]
        return await self._run(["diff", *words, "--dtype", dtype, "--policy", policy, "--format", "json"], timeout)

    async def trace(
        self,
        script: Annotated[str, "a training script below the root; it is executed"],
        arguments: Annotated[list[str] | None, "its own command line"] = None,
        look_for: Annotated[Literal["nan", "compare", "sanitize"], "what to watch each operation for"] = "sanitize",
        start_step: int = 0,
        end_step: int = 2,
        timeout: Annotated[float, "seconds"] = TIMEOUT,
    ) -> OutputResult:
        """EXECUTES the user's training script and watches the operations of some steps: NaN producers, hazards, wrong kernels."""
        real = self.folder.path(script)
        steps = ["--start-step", str(start_step), "--end-step", str(end_step)]
        return await self._run(["trace", "--lang", "en", f"--{look_for}", *steps, str(real), *(arguments or [])], timeout)

    async def _run(self, words: list[str], timeout: float) -> OutputResult:
        if not 0 < timeout <= 3600:
            raise NannyError(f"timeout is {timeout:g}; use up to 3600 seconds")
        import anyio

        head, log = _Clipped(), _Clipped()
        async with self._turns:
            with anyio.CancelScope(shield=True):  # else a call that is cancelled now would leave a process that nobody knows
                process = await anyio.open_process(
                    [sys.executable, "-m", "nanny.cli", *words],
                    cwd=self.folder.root,
                    stdin=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("LC_")},
                    start_new_session=True,
                )
            _groups.add(process.pid)
            try:
                with anyio.fail_after(timeout):
                    async with anyio.create_task_group() as readers:
                        readers.start_soon(head.read, process.stdout)
                        readers.start_soon(log.read, process.stderr)
                        code = await process.wait()
                        _end_group(process.pid)  # what the program has left behind would keep the streams open
            except TimeoutError:
                raise NannyError(f"`nanny {words[0]}` was stopped after {timeout:g} s; give a larger timeout") from None
            finally:
                _end_group(process.pid)
                with anyio.CancelScope(shield=True):
                    await process.aclose()
                _groups.discard(process.pid)
        notes = ["this executed code of the user"] + (["the output was cut in the middle"] if head.left_out else [])
        return OutputResult(f"nanny {shlex.join(words)}", code, head.text, log.text, notes)


_groups: set[int] = set()  # of processes that run now


def end_all_groups() -> None:
    """For a server that is told to end at once."""
    for group in list(_groups):
        _end_group(group)


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class _Clipped:
    """The beginning and the end of a stream, however long it is."""

    def __init__(self) -> None:
        self._head, self._tail, self.left_out = bytearray(), bytearray(), 0

    async def read(self, stream: Any) -> None:
        half = LONGEST_OUTPUT // 2
        async for piece in stream:
            room = max(half - len(self._head), 0)
            self._head += piece[:room]
            self._tail += piece[room:]
            too_much = max(len(self._tail) - half, 0)
            self.left_out += too_much
            del self._tail[:too_much]

    @property
    def text(self) -> str:
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n... {self.left_out} bytes left out ...\n{tail}" if self.left_out else head + tail
