"""What executes the user's code: `nanny diff` and `nanny trace` in a process of their own, only if the server was told so."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from ..core.finding import NannyError
from .folder import ReadableFolder
from .results import OutputResult

LONGEST_OUTPUT = 40_000
TIMEOUT = 600.0


@dataclass(frozen=True)
class RunTools:
    folder: ReadableFolder

    def diff(
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
        return self._run(["diff", *words, "--dtype", dtype, "--policy", policy, "--format", "json"], timeout)

    def trace(
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
        return self._run(["trace", f"--{look_for}", *steps, str(real), *(arguments or [])], timeout)

    def _run(self, words: list[str], timeout: float) -> OutputResult:
        if not 0 < timeout <= 3600:
            raise NannyError(f"timeout is {timeout:g}; use up to 3600 seconds")
        command = [sys.executable, "-m", "nanny.cli", *words]
        try:
            done = subprocess.run(
                command, cwd=self.folder.root, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            raise NannyError(f"`nanny {words[0]}` was stopped after {timeout:g} s; give a larger timeout") from None
        output, cut = _clip(done.stdout)
        log, _ = _clip(done.stderr)
        notes = ["this executed code of the user"] + (["the output was cut in the middle"] if cut else [])
        return OutputResult(f"nanny {shlex.join(words)}", done.returncode, output, log, notes)


def _clip(data: bytes) -> tuple[str, bool]:
    text = data.decode("utf-8", "replace")
    if len(text) <= LONGEST_OUTPUT:
        return text, False
    half = LONGEST_OUTPUT // 2
    return f"{text[:half]}\n... {len(text) - LONGEST_OUTPUT} characters left out ...\n{text[-half:]}", True
