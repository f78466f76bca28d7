"""A model's flat graph: the operations that torch.export found, numbered in order."""

from __future__ import annotations

from torch import fx, nn

from .aliases import changed_views
from .export import batch_sizes, export_model
from .forms import Arguments
from .fx_nodes import attributes, get_attribute, is_computed, is_random, is_shape_number, is_tensor
from .write_back import write_back_early


class FlatGraph:
    """The graph of a model as it stands (its training flags decide).

    Arguments:
        example: arguments of a microbatch, with the batch in dimension 0.

    Raises ValueError, with the user's source line, for a model that cannot be traced whole.

    Attributes:
        root: holds the parameters, buffers and constants that `get_attr` nodes name.
        nodes: [n] the operations.
        number: of each operation.
        placeholders: the tensors among the model's arguments.
        output, results: the output node, and the nodes of the tensors in the model's output.
        output_form: how these go together.
        batch_sizes: for which the graph is right.
        shape_nodes: operations on numbers derived from shapes: they are computed again wherever they are needed.
        random: the ordinal of each operation that draws random numbers.
        together: pairs of operations that no cut may separate.
    """

    def __init__(self, model: nn.Module, example: Arguments) -> None:
        self.root, ranges, self.output_form = export_model(model, example)
        written_back = write_back_early(self.root.graph)
        nodes = list(self.root.graph.nodes)
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        self.output = next(n for n in nodes if n.op == "output")
        self.batch_sizes = batch_sizes(self.placeholders, example.dims, ranges)
        self.nodes = [n for n in nodes if is_computed(n)]
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.shape_nodes = {n for n in self.nodes if is_shape_number(n)}
        self.results = tuple(self.output.args[0])
        self.random = {n: i for i, n in enumerate(n for n in self.nodes if is_random(n))}
        self.together = [*self._tuples_and_parts(), *changed_views(self.nodes)]
        self.together += [(before, node) for before, node in written_back if before in self.number]

    def _tuples_and_parts(self) -> list[tuple[fx.Node, fx.Node]]:
        tuples = [n for n in self.nodes if not is_tensor(n) and n not in self.shape_nodes]
        return [(node, user) for node in tuples for user in node.users if user in self.number]

    def uses_parameters(self, node: fx.Node) -> bool:
        """Whether the operation takes a parameter."""
        return any(isinstance(get_attribute(self.root, str(each.target)), nn.Parameter) for each in attributes(node))

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The operations whose values this one takes, numbers derived from shapes replaced by theirs."""
        if node in self.shape_nodes:
            return []
        found, todo = [], list(node.all_input_nodes)
        while todo:
            source = todo.pop()
            if source in self.shape_nodes:
                todo += source.all_input_nodes
            elif source in self.number:
                found.append(source)
        return found

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Who takes the value of this operation, numbers derived from shapes replaced by their users."""
        found, todo = [], list(node.users)
        while todo:
            user = todo.pop()
            if user in self.shape_nodes:
                todo += user.users
            else:
                found.append(user)
        return found
