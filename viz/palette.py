"""The colours of pictures: the op determines the hue, the chunk its shade, and every other batch is a little paler.

Hues are those of Okabe and Ito ("Color Universal Design", 2008). Those of idle causes were found by search: any two
differ by 20 of CIE 1976 or more under the common forms of colour blindness, and all are visible on white and on a dark
ground.
"""

from __future__ import annotations

from ..schedules import MemoryPart, MessageKind, Op

RGB = tuple[float, float, float]

_OPS = {
    Op.F: ("#0072B2", "F forward"),  # blue
    Op.B: ("#E69F00", "B backward"),  # orange
    Op.I: ("#009E73", "I input gradient"),  # green
    Op.W: ("#CC79A7", "W weight gradient"),  # pink
    Op.U: ("#5C5C5C", "U update"),  # grey
}
OP_HUES, OP_WORDS = ({op: row[at] for op, row in _OPS.items()} for at in range(2))
OTHER_HUE = "#A6A6A6"  # gathers, reductions
_MESSAGES = {
    MessageKind.ACT: (OP_HUES[Op.F], "activations arriving"),  # the hue of the op that makes it
    MessageKind.GRAD: ("#D55E00", "gradients arriving"),  # an orange that shows in a thin lane
    MessageKind.LOSS: (OP_HUES[Op.U], "loss arriving"),
    MessageKind.SUM: (OP_HUES[Op.W], "shared gradients arriving"),
    MessageKind.NORM: ("#56B4E9", "gradient norm arriving"),  # sky blue
    MessageKind.TOTAL: (OP_HUES[Op.I], "global norm arriving"),
    MessageKind.WEIGHTS: ("#882255", "updated weights arriving"),  # wine
}
MESSAGE_HUES, MESSAGE_WORDS = ({kind: row[at] for kind, row in _MESSAGES.items()} for at in range(2))
_COLLECTIVES = {
    Op.REDUCE_GRAD: (OP_HUES[Op.W], "all-reduces of shared gradients"),
    Op.UNSHARD: ("#882255", "weights gathered"),
    Op.RESHARD: (OTHER_HUE, "weights let go"),
    Op.EXCHANGE: ("#117733", "exchanges within a stage"),  # dark green
    Op.OFFLOAD: ("#332288", "activations to the host"),  # indigo
    Op.RELOAD: ("#44AA99", "activations coming back"),  # teal
}
COLLECTIVE_HUES, COLLECTIVE_WORDS = ({op: row[at] for op, row in _COLLECTIVES.items()} for at in range(2))
CAUSE_HUES = {  # by field of `Idle`
    "data": "#F078FF",
    "warm_up": "#DDCC77",
    "drain": "#999933",
    "late_peer": "#CC1F75",
    "transfer": "#43E622",
    "imbalance": "#E67E7E",
    "update": "#994636",
    "unexplained": "#8250E6",
}
SERIES_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#5C5C5C")  # lines of plots
MEMORY_HUES = {  # Tol's bright scheme; activations in none of the blues of forwards
    MemoryPart.WEIGHTS: "#4477AA",
    MemoryPart.GRADIENTS: "#EE6677",
    MemoryPart.OPTIMIZER: "#CCBB44",
    MemoryPart.BUFFERS: "#BBBBBB",
    MemoryPart.ACTIVATIONS: "#8422E6",
    MemoryPart.WORKSPACE: "#AA3377",
    MemoryPart.MESSAGES: "#228833",
}
IDLE_FILL, IDLE_HATCH = "#FAFAFA", "#CDCDCD"
_PALEST = 0.58  # how far the last chunk's shade is mixed with white
_ODD_BATCH = 0.36  # likewise, every other batch


def box_colour(op: Op, *, chunk: int, num_chunks: int, batch: int) -> RGB:
    """The colour of an action: the full hue for chunk 0, the palest for the last one; in odd batches paler still.

    >>> box_colour(Op.F, chunk=0, num_chunks=2, batch=0) == rgb(OP_HUES[Op.F])
    True
    """
    colour = mixed(rgb(OP_HUES.get(op, OTHER_HUE)), _PALEST * chunk / max(num_chunks - 1, 1))
    return mixed(colour, _ODD_BATCH) if batch % 2 else colour


def rgb(hue: str) -> RGB:
    """Red, green and blue of #RRGGBB."""
    red, green, blue = (int(hue[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def hex_of(colour: RGB) -> str:
    """#rrggbb."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def mixed(colour: RGB, white: float) -> RGB:
    red, green, blue = colour
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def ink(background: RGB) -> str:
    """Black or white, whichever has more contrast (relative luminance as in WCAG 2).

    >>> ink((0.0, 0.0, 0.5)), ink((1.0, 1.0, 0.0))
    ('white', 'black')
    """
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background)
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"
