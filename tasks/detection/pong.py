"""Frames of the game Pong with boxes around players and ball."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.detection.sources import BoxSource, Objects

FIELD = slice(34, 194)
"""Rows of the playing field in a frame of 210 × 160 pixels."""
COLOURS = {"player": (92, 186, 92), "enemy": (213, 130, 74), "ball": (236, 236, 236)}
FRAMES_PER_EPISODE = 50
_FIRST_SEEDS = {"train": 0, "dev": 1_000_000, "test": 2_000_000}
_LONGEST_ACTION = 12  # frames


class PongFrames(BoxSource):
    """Frames of Atari's Pong under random actions, 210 × 160 pixels, from the package ale-py.

    An action is repeated for 2 to 11 frames, and the frame after it is a record. The boxes are
    those of the pixels with the colours of the right paddle ("player"), the left paddle ("enemy")
    and the ball, inside of the playing field. Every episode has its own seed, and a split has its
    own episodes of 50 records.

    Tekso does not require ale-py, which has the licence GPL-2.

    Raises:
      InputError: ale-py is not installed.
    """

    class Params(BoxSource.Params):
        """Params of PongFrames."""

        num_train: int = param("Number of frames for training.", default=800)
        num_held_out: int = param("Number of frames for dev, and for test.", default=300)

    class_names = tuple(COLOURS)
    has_files = False

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        if min(p.num_train, p.num_held_out) < 1:
            raise ValueError(
                f"{p.path_of('num_train')} is {p.num_train} and num_held_out is "
                f"{p.num_held_out}, but must be at least 1"
            )
        count = p.num_train if split == "train" else p.num_held_out
        frames: list[np.ndarray] = []
        seed = _FIRST_SEEDS[split]
        while len(frames) < count:
            frames += episode(seed, min(FRAMES_PER_EPISODE, count - len(frames)))
            seed += 1
        self._frames = frames
        self._objects = [objects_in(frame) for frame in frames]

    def __len__(self) -> int:
        return len(self._frames)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"Pong, {self.split}", index, "record")

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return "frames of Pong"

    def objects(self, index: int) -> Objects:
        """See `BoxSource`."""
        return self._objects[index]

    def image(self, index: int) -> np.ndarray:
        """See `BoxSource`."""
        return self._frames[index]


def episode(seed: int, most: int) -> list[np.ndarray]:
    """Returns frames of one game under random actions, each [210, 160, 3] uint8.

    Raises:
      InputError: ale-py is not installed.
    """
    try:
        from ale_py import ALEInterface, LoggerMode, roms
    except ImportError as error:
        raise InputError(
            "the frames of Pong need the package ale-py, which has the licence GPL-2: "
            "pip install ale-py"
        ) from error
    ALEInterface.setLoggerMode(LoggerMode.Error)
    game = ALEInterface()
    game.setInt("random_seed", seed % 2**31)
    game.setFloat("repeat_action_probability", 0.0)
    game.loadROM(roms.get_rom_path("pong"))
    actions = game.getMinimalActionSet()
    random = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    while not game.game_over() and len(found) < most:
        action = actions[random.integers(len(actions))]
        for _ in range(random.integers(2, _LONGEST_ACTION)):
            game.act(action)
        found.append(np.array(game.getScreenRGB()))
    return found


def objects_in(frame: np.ndarray) -> Objects:
    """Returns the boxes of the pixels with the colours of players and ball.

    Shapes:
      frame: [210, 160, 3] uint8
    """
    found = list(_boxes_in(frame))
    return Objects.of([box for _, box in found], [label for label, _ in found], frame.shape[:2])


def _boxes_in(frame: np.ndarray) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    field = frame[FIELD]
    for label, colour in enumerate(COLOURS.values(), 1):
        rows, columns = np.nonzero((field == np.array(colour, np.uint8)).all(-1))
        if len(rows):
            top = FIELD.start + int(rows.min())
            bottom = FIELD.start + int(rows.max()) + 1
            yield label, (top, int(columns.min()), bottom, int(columns.max()) + 1)
