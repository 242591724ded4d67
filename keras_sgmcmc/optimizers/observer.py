"""What may look at the moves of a sampler from within its update."""


class StepObserver:
    """Sees every variable before and after it moves, in the program that moves it.

    See `Sampler.observed_by`. What it reads there costs less than a pass of its own over the
    weights. Its methods are traced with the update, once.
    """

    def is_due(self):
        """A bool tensor, whether it wants to see this step; None for all steps."""
        return None

    def before_move(self, index, variable, law):
        """Called for variable number `index` when its H is known.

        `law()` gives the tensors (g with the prior's gradient, H g, Q): the last two are None where
        H is a matrix, and Q is None if no noise is injected. Call it in a branch of the graph, so
        that it leaves the arithmetic of the move alone.
        """

    def after_move(self, index, variable):
        """Called when variable number `index` has moved; `optimizer.iterations` comes later."""
