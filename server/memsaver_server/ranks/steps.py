"""The steps of one operation over all ranks. If one fails, it and those before it are undone, in reverse order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memsaver_core import PhaseLog
from memsaver_core.errors import MemsaverError
from memsaver_core.ranks.protocol import Answer, Plan, Request
from memsaver_core.reports import OperationReport
from memsaver_server.ranks.group import Group, GroupFailedError

#: Something that every rank does; returns their answers.
Act = Callable[[], list[Answer]]


class Steps:
    """Takes steps on every rank of ``group``, and adds their phases to ``log``.

    Attributes:
        reports: what the ranks reported so far.
        failed_phase: the phase that the first rank that failed was in, or an empty string.
        phase: the phase to tell while no rank tells one.
    """

    def __init__(self, group: Group, log: PhaseLog) -> None:
        self._group = group
        self._log = log
        self._undo: list[tuple[str, Act]] = []
        self.reports: list[OperationReport] = []
        self.failed_phase = ""
        self.phase = "prepare"

    def prepare(self, request: Request) -> list[Plan]:
        """Have every rank check the operation; nothing is changed.

        Raises:
            MemsaverError: it is impossible on some rank.
        """
        self._group.step = "preparation"
        answers = self._group.ask(request, self._group.deadlines.prepare_s)
        self._check(answers)
        return [answer.plan or Plan() for answer in answers]

    def take(self, name: str, phase: str, act: Act, undo: Act) -> None:
        """Have every rank do ``act``.

        Args:
            name: what messages call the step.
            phase: see the attribute.
            undo: takes back what ``act`` did, on the ranks on which it did anything.

        Raises:
            GroupFailedError: the ranks have failed.
            MemsaverError: a rank could not do it; all ranks are as before the operation.
        """
        self.phase, self._group.step = phase, name
        self._undo.append((name, undo))
        try:
            answers = act()
            self._check(answers)
            reports = [answer.report for answer in answers if answer.report is not None]
            if len(reports) < len(answers):
                raise MemsaverError(
                    "a rank sent no report: the engine's own call did not reach its memory; repeat the call"
                )
        except GroupFailedError:
            raise
        except MemsaverError as error:
            self._undo_all(error)
            raise
        self.reports += reports
        self._log.add(self._group.devices.merged_phases(reports))

    def _check(self, answers: Sequence[Answer]) -> None:
        self.failed_phase = next((each.failure.phase for each in answers if each.failure is not None), "")
        self._group.check(answers)

    def _undo_all(self, error: MemsaverError) -> None:
        for name, undo in reversed(self._undo):
            self._group.step = f"undoing of the {name}"
            try:
                self._group.check(undo())
            except GroupFailedError:
                raise
            except MemsaverError as left:
                raise self._group.fail(f"{error}; and the {name} cannot be undone: {left}") from error
