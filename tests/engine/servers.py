"""llama-server with the plugin, and what it is asked."""

from __future__ import annotations

import json
import os
import random
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moetuner.demo.services import LlamaServer, Service, free_port

WORDS = ("river", "stone", "bird", "lamp", "seven", "under", "cloud", "paper", "salt", "often")
TOKENS = 24


def _prompts() -> list[str]:
    """Twelve, of 1 to 78 words."""
    source = random.Random(5)
    return [" ".join(source.choice(WORDS) for _ in range(1 + 7 * n)) for n in range(12)]


PROMPTS = _prompts()


class Server(LlamaServer):
    """With `env`; `text` is greedy."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str]) -> None:
        self.port = free_port()
        address: list[str | Path] = ["--host", "127.0.0.1", "--port", str(self.port)]
        # Sleeping threads: the tests share their cores with others.
        env = {"OMP_WAIT_POLICY": "passive", **env}
        Service.__init__(self, "llama-server", [*command, *address], log, env)

    def text(self, prompt: str, **body: object) -> str:
        """HTTPError if the server says that it failed."""
        asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            data=json.dumps({**asked, **body}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            content: str = json.load(response)["content"]
            return content

    def said(self, *words: str) -> list[str]:
        """Lines of its log with all the words."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if all(word in line for word in words)]

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


Start = Callable[..., Server]
