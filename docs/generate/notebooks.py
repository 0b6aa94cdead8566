"""The notebooks of docs/notebooks, written and executed: `python docs/generate/notebooks.py`.

Their cells stand here, so that a change is a change of text; `execute` runs code cells in one process, as a kernel
does, and the tests run what is stored by it.
"""

import ast
import base64
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

FOLDER = Path(__file__).parent.parent / "notebooks"

NOTEBOOKS = {
    "regression": [
        "# Uncertainty of a regression\n\nA network of one's own, a posterior around it, and intervals that widen "
        "where there are no data.",
        """
import torch
from torch import nn

import dubito

generator = torch.Generator().manual_seed(0)
x = torch.rand(120, 1, generator=generator) * 4 - 2
x = x[(x.abs() > 0.5).flatten()]  # a gap in the middle
y = torch.sin(2 * x) + 0.1 * torch.randn(x.shape, generator=generator)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
training = dubito.Training(iterations=600, lr=1e-2, batch_size=64)
posterior = dubito.Laplace(prior_precision=1.0).fit(net, (x, y), dubito.Gaussian(), training=training)
posterior
""",
        "A posterior shows which parameter holds what. A prediction shows its first rows:",
        """
grid = torch.linspace(-4, 4, 81)[:, None]
prediction = posterior.predict(grid)
prediction
""",
        "`plot` draws the mean and its intervals; the dots are the data.",
        """
axis = prediction.plot(inputs=grid[:, 0])
axis.plot(x.flatten().tolist(), y.flatten().tolist(), "k.", markersize=3)
axis.figure
""",
        """
inside, outside = posterior.predict(torch.tensor([[1.0]])), posterior.predict(torch.tensor([[4.0]]))
print(f"epistemic std: {inside.epistemic_std.item():.3f} among the data, {outside.epistemic_std.item():.3f} outside")
""",
    ],
    "ensembles": [
        "# Ensembles of your own networks\n\nNetworks that you trained already become one posterior, with the parts of "
        "its uncertainty.",
        """
import torch
from torch import nn

import dubito

generator = torch.Generator().manual_seed(0)
x = torch.randn(200, 2, generator=generator)
y = ((x[:, 0] * x[:, 1]) > 0).long()


def trained(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


ensemble = dubito.DeepEnsemble.from_networks([trained(seed) for seed in range(3)], dubito.Categorical())
ensemble.summary()
""",
        """
test = torch.randn(400, 2, generator=generator)
truth = ((test[:, 0] * test[:, 1]) > 0).long()
for name, value in ensemble.evaluate((test, truth)).items():
    print(f"{name} {value:.3f}")
""",
        "Wrong answers are where the members do not agree:",
        """
ensemble.predict(test).plot(truth).figure
""",
    ],
    "tables": [
        "# Tables with scikit-learn\n\nThe estimators take frames with words and gaps as they come.",
        """
import numpy as np
import pandas

from dubito.integrations.sklearn import BayesianRegressor

rng = np.random.default_rng(0)
cars = pandas.DataFrame({"age": rng.uniform(0, 10, 150), "fuel": rng.choice(["petrol", "electric"], 150)})
price = 20 - cars["age"] + 9 * (cars["fuel"] == "electric") + rng.normal(size=150)
cars.loc[::9, "age"] = None
model = BayesianRegressor("laplace-inf").fit(cars, price)
new = pandas.DataFrame({"age": [1.0, 9.0, None, 30.0], "fuel": ["petrol", "electric", "petrol", "petrol"]})
low, high = model.predict_interval(new, 0.9)
new.assign(price=model.predict(new).round(1), low=low.round(1), high=high.round(1))
""",
        "An age of 30 lies far outside of what was seen: the epistemic part grows.",
        """
for kind in ("aleatoric", "epistemic"):
    print(kind, " ".join(f"{value:.2f}" for value in model.predict_uncertainty(new, kind)))
""",
    ],
}


def written(cells: list[str]) -> Any:
    """A notebook of words and code: code begins with a line break."""
    made = []
    for number, text in enumerate(cells):
        cell = v4.new_code_cell(text.strip()) if text.startswith("\n") else v4.new_markdown_cell(text)
        cell["id"] = f"cell-{number}"
        made.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def execute(notebook: Any) -> None:
    """Run the code cells in order and put their outputs in place of those that stood there."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells, 1):
        *body, last = ast.parse(cell.source).body
        if not isinstance(last, ast.Expr):
            body.append(last)
        printed, value = io.StringIO(), None
        with redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "cell", "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        cell.execution_count, cell.outputs = number, []
        if printed.getvalue():
            cell.outputs.append(v4.new_output("stream", text=printed.getvalue()))
        if value is not None:
            cell.outputs.append(v4.new_output("execute_result", shown(value), execution_count=number))


def shown(value: Any) -> dict[str, str]:
    """What a notebook keeps of a value: its table or picture, and words."""
    if hasattr(value, "savefig"):
        value.set_size_inches(5, 3.2)
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=90)
        return {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": "<Figure>"}
    words = {"text/plain": type(value).__name__}
    return words | {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else words


def main() -> None:
    """Write all."""
    FOLDER.mkdir(exist_ok=True)
    for name, cells in NOTEBOOKS.items():
        notebook = written(cells)
        execute(notebook)
        nbformat.validate(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
