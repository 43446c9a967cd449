from __future__ import annotations

import torch


class WorkspaceManager:
    def __init__(self) -> None:
        self._current_workspaces: list[torch.Tensor | None] = [None]
        self._locked = False

    def _ensure_workspace_size(self, required_bytes: int) -> torch.Tensor:
        held = self._current_workspaces[0]
        if held is None or held.numel() < required_bytes:
            held = self._current_workspaces[0] = torch.ones(required_bytes, dtype=torch.uint8)
        return held
