"""Table III as docs/papers_fedadmm.md has it is what `paper fedadmm table3 --hours 0` makes of the rows that are kept.

`python tests/papers/test_fedadmm_docs.py` writes the table anew.
"""

from __future__ import annotations

from pathlib import Path

from fedpact.papers import fedadmm
from fedpact.papers.fedadmm_cells import Results, estimate
from fedpact.papers.fedadmm_rounds import told

DOCS = Path(__file__).parents[2] / "docs"
PAGE, BEGIN, END = DOCS / "papers_fedadmm.md", "<!-- table3 -->\n", "<!-- end -->"
LINES = {
    "FedADMM": "FedADMM",
    "FedADMM as printed": "Algorithm 1",
    "FedAvg, all but duals of FedADMM": "without duals",
    **{name: name for name in ("FedSGD", "FedAvg", "FedProx", "SCAFFOLD")},
}


def table():
    results, entries = Results(DOCS / "fedadmm_results.csv", "docs"), fedadmm._table3_entries()
    hours = {row["cell"]: row for row in fedadmm._hours(results, entries)}
    out = [["rounds to the target", *LINES.values(), "hours", "all lines to do"]]
    out.append(["---"] * len(out[0]))
    for cell, printed in fedadmm.PRINTED.items():
        mine = {e.label: e for e in entries if e.cell.name == cell}
        row = [cell]
        for label in LINES:
            entry = mine[label]
            found = results.find(entry)
            shown = told(found) if found else f"– ({estimate(results, entry):.1f} h)"
            if label in fedadmm.ORDER:
                n = printed[fedadmm.ORDER.index(label)]
                shown += f" [{'100+' if n == 101 else n}]"
            row.append(shown)
        out.append([*row, f"{hours[cell]['hours']:.1f}", f"{hours[cell]['to do']:.0f} h"])
    out.append(["all", *[""] * len(LINES), f"{hours['all']['hours']:.1f}", f"{hours['all']['to do']:.0f} h"])
    return "".join(f"| {' | '.join(row)} |\n" for row in out)


def test_table_3_of_the_docs_is_that_of_the_rows():
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
