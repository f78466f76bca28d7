"""One headless Chromium for all tests that look at the page, skipped with the reason where there is none."""

import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from stagewright.viz import Exhibit, write_explorer


class Looked:
    """A page that is open, and its requests; errors and console messages are said."""

    def __init__(self, page: Any, said: list[str]) -> None:
        self.page = page
        self.requests: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Value of a JavaScript expression or function."""
        return self.page.evaluate(script, argument)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def until(self, condition: str) -> None:
        """Wait for a JavaScript expression to hold; playwright's own way is forbidden by the page."""
        for _ in range(4000):
            if self.evaluate(condition):
                break
            self.page.wait_for_timeout(50)
        else:
            raise TimeoutError(f"200 s without {condition}")
        self.settle()

    def place(self, panel: int, row: int, i: int) -> tuple[float, float]:
        """Middle of a box [pixels of the window]."""
        return tuple(
            self.evaluate(
                """([panel, row, i]) => {
                    const view = stagewright.view, place = view.panels[panel].rows[row], track = place.row.tracks[0];
                    const [top, height] = view.in(view.panels[panel].panel).lineOf(place, track);
                    const box = document.getElementById("base").getBoundingClientRect();
                    const x = (view.x(track.start[i]) + view.x(track.end[i])) / 2;
                    return [box.left + x, box.top + top + height / 2 - view.scroll];
                }""",
                [panel, row, i],
            )
        )

    def colours(self, places: Sequence[tuple[float, float]]) -> list[str]:
        """Colours that a person sees at places of the window, as #RRGGBB."""
        picture = imread(io.BytesIO(self.page.screenshot()))
        pixels = [picture[int(y), int(x)] for x, y in places]
        return ["#" + "".join(f"{round(255 * part):02X}" for part in pixel[:3]) for pixel in pixels]


class Browser:
    """Opens pages, one at a time."""

    def __init__(self, chromium: Any, folder: Path) -> None:
        self._page = chromium.new_page(viewport={"width": 1200, "height": 800})
        self._chromium, self._path = chromium, folder / "page.html"
        self.said: list[str] = []

    def show(self, *exhibits: Exhibit) -> Looked:
        """Open the explorer of some exhibits, and wait until it is drawn."""
        write_explorer(exhibits, self._path)
        return self._open()

    def show_html(self, text: str) -> Looked:
        """Open any page."""
        self._path.write_text(text, encoding="utf-8")
        return self._open()

    def _open(self) -> Looked:
        self._page.close()
        self._page = self._chromium.new_page(viewport={"width": 1200, "height": 800})
        looked = Looked(self._page, self.said)
        self._page.goto(self._path.as_uri())
        looked.settle()
        return looked


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium, started by the first test that asks for it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: `make extras` installs it")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on the PATH: install the package chromium")
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield Browser(chromium, tmp_path_factory.mktemp("explorer"))
        chromium.close()


@pytest.fixture(autouse=True)
def no_page_complains(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of errors, or on the console."""
    yield
    if "browser" in request.fixturenames:
        said = request.getfixturevalue("browser").said
        assert [said.pop() for _ in range(len(said))] == []
