"""What can be seen of a model, by name."""

VIEWS = {
    "anatomy": "the model on one page: its parts, shapes, counts and source lines",
    "attention": "who looks at whom: every head of every layer; --layer, --head, --word",
    "heads": "what each head does, and what it costs to take it out",
    "surprise": "how surprising each token of a text is, and what was expected",
    "lens": "what each layer would predict",
    "saliency": "which tokens the last prediction hangs on",
    "search": "greedy search, beam search and samples as trees",
    "costs": "parameters, operations and bytes by component and layer",
    "growth": "how the costs grow with length, width, depth and vocabulary",
    "timing": "a real step's time beside the predicted one",
    "graph": "the computation graph, forward and backward",
    "gradients": "the gradient's size through the layers; pre-norm and post-norm, skips or not",
    "positions": "position encodings as stripes, and against distance",
    "activations": "activation functions and their slopes",
    "schedule": "the learning rate at each step",
    "weights": "histograms of the weights, and of the activations on a text",
}
# those that show a text, and so need a model that is trained
OF_A_TEXT = ("attention", "heads", "surprise", "lens", "saliency", "search", "gradients", "weights", "graph")
