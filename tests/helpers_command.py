"""Run `fedpact …` as a process of its own, quickly: see helpers_zygote."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PATIENCE = 120.0  # seconds that one command may take before the test gives up on it


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Process:
    def __init__(self, zygote: Zygote, pid: int, out: Path, err: Path) -> None:
        self.zygote, self.pid, self.out, self.err = zygote, pid, out, err
        self.code: int | None = None

    def poll(self, timeout: float = 0.0) -> int | None:
        if self.code is None:
            self.code = self.zygote.ask({"pid": self.pid, "timeout": timeout})["code"]
        return self.code

    def send(self, number: int) -> None:
        assert self.code is None, "the process has ended"
        os.kill(self.pid, number)

    def wait(self, timeout: float = PATIENCE) -> Done:
        if self.poll(timeout) is None:
            self.send(signal.SIGKILL)
            self.poll(10)
            raise AssertionError(f"still running after {timeout} s: {self.err.read_text()}")
        return Done(self.code, self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8"))


class Zygote:
    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "helpers_zygote.py")]
        env = os.environ | {"PYTHONIOENCODING": "utf-8", "MPLBACKEND": "agg"}
        env.pop("PYTHONUNBUFFERED", None)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        assert json.loads(self.process.stdout.readline())["ready"]

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        *arguments: object,
        cwd: Path,
        plots: bool = False,
        checkpoint_seconds: float | None = None,
        file_limit: int | None = None,
        env: dict[str, str] | None = None,
    ) -> Process:
        number = next(self.numbers)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd),
            "plots": plots,
            "checkpoint_seconds": checkpoint_seconds,
            "file_limit": file_limit,
            "env": env or {},
            "stdout": str(out),
            "stderr": str(err),
        }
        return Process(self, self.ask(request)["pid"], out, err)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
