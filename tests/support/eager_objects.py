"""Models like those of `eager_models`, whose units read and write objects that the code between them hands on."""

from torch import Tensor

from .eager_models import Block, Stack


class Layers:
    """A cache whose places are objects, one of them with a tensor that the forward has made."""

    def __init__(self, scale: Tensor) -> None:
        self.layers = [Layer(), Layer(), Layer(), Layer()]
        self.layers[2].scale = scale


class Layer:
    def __init__(self) -> None:
        self.seen: Tensor | None = None
        self.scale: Tensor | None = None


class LayeredBlock(Block):
    def forward(self, x: Tensor, cache: Layers, index: int) -> Tensor:  # type: ignore[override]
        place = cache.layers[index]
        place.seen = x if place.seen is None else place.seen + x
        return super().forward(place.seen if place.scale is None else place.seen * place.scale)


class WithNestedObjects(Stack):
    """As transformers passes on its caches: objects within an object, which were taken for the first one in it."""

    def __init__(self) -> None:
        super().__init__(LayeredBlock)

    def forward(self, x: Tensor) -> Tensor:
        cache = Layers(x.mean() + 1)
        for index, block in enumerate(self.blocks):
            x = block(x, cache, index)
        return self.head(x)


class Steps:
    def __init__(self) -> None:
        self.number = 0


class CountedBlock(Block):
    def forward(self, x: Tensor, steps: Steps) -> Tensor:  # type: ignore[override]
        steps.number += 1
        return super().forward(x) * steps.number


class CountsInAnObject(Stack):
    def __init__(self) -> None:
        super().__init__(CountedBlock)

    def forward(self, x: Tensor) -> Tensor:
        steps = Steps()
        for block in self.blocks:
            x = block(x, steps)
        return self.head(x) * steps.number


class CountsBetween(Stack):
    """The same written by the code between the blocks."""

    def __init__(self) -> None:
        super().__init__(ReadingBlock)

    def forward(self, x: Tensor) -> Tensor:
        steps = Steps()
        for block in self.blocks:
            x = block(x, steps)
            steps.number += 1
        return self.head(x)


class ReadingBlock(Block):
    depth = 1

    def forward(self, x: Tensor, steps: Steps | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x) * (self.depth + (steps.number if steps else 0))


class SetsBetween(Stack):
    def __init__(self) -> None:
        super().__init__(ReadingBlock)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.depth = index  # type: ignore[assignment]
            x = block(x)
        return self.head(x)
