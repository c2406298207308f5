"""The real llama.cpp for tests: see the fixtures llama, moe_model, llama_server."""

from __future__ import annotations

from pathlib import Path

from moetuner.demo.llamacpp import LlamaBuild
from moetuner.demo.services import LlamaServer


class Servers:
    """Starts llama-servers below a directory and stops all of them at the end."""

    def __init__(self, build: LlamaBuild, logs: Path) -> None:
        self._build = build
        self._logs = logs
        self._running: list[LlamaServer] = []

    def start(self, model: Path, *arguments: str) -> LlamaServer:
        """A server that answers requests. `arguments` such as `--cpu-moe` come last."""
        log = self._logs / f"llama-server-{len(self._running)}.log"
        server = LlamaServer(self._build.server, model, log, arguments)
        self._running.append(server)
        server.await_ready()
        return server

    def stop(self) -> None:
        for server in self._running:
            server.stop()
