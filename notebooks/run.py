"""Run every notebook from its start and write its outputs into it: ``make notebooks``.

    python notebooks/run.py                 all of them
    python notebooks/run.py 03_sequences    those whose name holds one of these words

What would differ from run to run (times of cells, the machine's Python) is not written.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def run(file: Path) -> None:
    """Execute one notebook in a kernel of its own, in place.

    Raises: CellExecutionError with the cell that failed; the file is then as it was.
    """
    book = nbformat.read(file, 4)
    NotebookClient(book, timeout=120, kernel_name="python3", record_timing=False).execute()
    book.metadata.language_info = {"name": "python"}
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        said = [o for o in cell.get("outputs", []) if o.get("name") == "stderr"]
        assert not said, f"{file.name} warns: {said[0].text}"
        for i, output in enumerate(cell.get("outputs", [])):  # a stream in one piece
            if i and output.get("name") == "stdout" == cell.outputs[i - 1].get("name"):
                output.text = cell.outputs[i - 1].text + output.text
                cell.outputs[i - 1].name = "merged"
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "merged"]
    nbformat.write(book, file)


if __name__ == "__main__":
    for file in sorted(HERE.glob("*.ipynb")):
        if any(word in file.name for word in sys.argv[1:] or [""]):
            started = time.perf_counter()
            run(file)
            print(f"{file.name}: {time.perf_counter() - started:.0f} s", flush=True)
