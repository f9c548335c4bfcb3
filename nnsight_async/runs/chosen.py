"""The edits that are installed somewhere, and which of them a request runs."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Sequence

from nnsight_async.runs.edit import Installed


class InstalledEdits:
    """Edits in the order in which they were installed. Any thread may ask which there are."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._installed: dict[int, Installed] = {}

    @property
    def installed(self) -> tuple[Installed, ...]:
        with self._changing:
            return tuple(self._installed.values())

    def chosen(self, names: Sequence[str] | None) -> tuple[Installed, ...]:
        """All edits for None; else those named and every one without a name. `ValueError` for an unknown name."""
        installed = self.installed
        if names is None or not installed:
            wanted = names or ()
        else:
            wanted = names
            installed = tuple(edit for edit in installed if edit.name is None or edit.name in names)
        known = {edit.name for edit in installed}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise ValueError(self._unknown(unknown[0]))
        return installed

    def add(self, edit: Installed) -> None:
        """Have requests run `edit` from here on; `ValueError` if there is one of that name."""
        with self._changing:
            self.check_name(edit.name)
            self._installed[edit.number] = edit

    def remove(self, numbers: Iterable[int] | None) -> list[int]:
        """Have no request run these edits (None: any) from here on; returns those that were there."""
        with self._changing:
            chosen = [
                number for number in (self._installed if numbers is None else numbers) if number in self._installed
            ]
            for number in chosen:
                del self._installed[number]
        return chosen

    def check_name(self, name: str | None) -> None:
        """`ValueError` if an edit of that name is installed."""
        if name is not None and any(edit.name == name for edit in self._installed.values()):
            raise ValueError(f"an edit named {name!r} is installed; clear it first, or give this one another name")

    def _unknown(self, name: str) -> str:
        names = [edit.name for edit in self.installed if edit.name is not None]
        near = difflib.get_close_matches(str(name), names, 1)
        instead = f"did you mean {near[0]!r}?" if near else f"there are {names}" if names else "none has a name"
        return f"edits={name!r}: no edit of this engine has that name; {instead}"
