"""A real browser, driven over the DevTools protocol through a pipe: events as of a person, and nothing to install."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# The browser reads from descriptor 3 and writes to 4; both are first moved out of each other's way.
_LAUNCH = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]);"
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_PATIENCE = 60.0


class Browser:
    """A running browser."""

    def __init__(self, profile: Path, network: bool = False) -> None:
        assert CHROMIUM is not None
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        reached = () if network else ("--host-resolver-rules=MAP * ~NOTFOUND",)
        launch = [sys.executable, "-S", "-c", _LAUNCH, str(theirs_in), str(theirs_out), CHROMIUM, *_ARGUMENTS]
        self._process = subprocess.Popen(
            [*launch, *reached, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._pending = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask for something, and return the answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._write, json.dumps(message if session is None else {**message, "sessionId": session}).encode())
        os.write(self._write, b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            self._pending += os.read(self._read, 1 << 20)
        message, _, self._pending = self._pending.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, address: str, width: int = 1400, height: int = 900, dark: bool = False) -> Page:
        """Open a page in a new tab, and wait until its charts are drawn."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.theme(dark)
        page.send("Page.navigate", url=address)
        page.until("document.readyState === 'complete'")
        if page.evaluate("Boolean(document.getElementById('charts'))"):
            page.until("document.documentElement.dataset.charts === 'drawn'")
        return page

    def close(self) -> None:
        """End it."""
        try:
            self.send("Browser.close")
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)


class Page:
    """A page in a tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the tab for something."""
        return self._browser.send(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression in the page, and wait for it where it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        end = time.monotonic() + _PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"it never came true that {condition}"
            time.sleep(0.02)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, dark: bool, media: str = "") -> None:
        """Prefer dark or light, on a screen or in print."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[feature])

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Bring an element into sight; return a point within it."""
        found = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({ block: 'center', behavior: 'instant' }); const box = found.getBoundingClientRect();"
            "return [box.x, box.y, box.width, box.height]; })()"
        )
        return found[0] + across * found[2], found[1] + down * found[3]

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the pointer over an element."""
        self.point(*self.place(selector, across, down))

    def click(self, selector: str) -> None:
        """Press an element with the mouse."""
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key: Tab, Enter, Space, ArrowDown ..."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowDown": (40, "")}[key]
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def write(self, selector: str, text: str) -> None:
        """Write into a field."""
        self.click(selector)
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a menu. Menus of a browser without a screen cannot be opened, so the event is made."""
        self.evaluate(
            f"(() => {{ const menu = document.querySelector({json.dumps(selector)}); menu.value = {json.dumps(value)};"
            "menu.dispatchEvent(new Event('change', { bubbles: true })); return menu.value; })()"
        )

    def screenshot(self, path: Path) -> None:
        """Take a picture of the whole page."""
        width, height = self.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    @property
    def complaints(self) -> list[str]:
        """What the page wrote on its console, and what it threw."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self._events() if event["method"] in kinds]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page asked for, beyond its own and what it carries itself."""
        asked = [
            event["params"]["request"] for event in self._events() if event["method"] == "Network.requestWillBeSent"
        ]
        return [one["url"] for one in asked[1:] if not one["url"].startswith(("data:", "blob:"))]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


@contextmanager
def running(profile: Path, network: bool = False) -> Iterator[Browser]:
    """A browser for as long as it is needed; without a network unless one is asked for."""
    browser = Browser(profile, network)
    try:
        yield browser
    finally:
        browser.close()
