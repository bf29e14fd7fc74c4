"""Test bed: several hosts on one machine, joined by links of a known rate, with a whole fleetstart over them.

    with Testbed(nodes=4, mbit=200) as bed:
        bed.fs("deploy", "examples/hello/handler.py")
        bed.http.post("/fn/hello", json={})
        bed.cut(0)                      # pull a cable; bed.node(1).kill(), bed.stall_store() and others in `bed`

`network` makes hosts and links, `parts` runs processes on them, `bed` puts together what a system needs, and `guard`
sees to it that nothing stays, however it ends. By hand: `python -m tests.testbed --help`. It takes root and Linux;
`why_not` says what is missing, for tests to skip by.
"""

from tests.testbed.bed import Testbed
from tests.testbed.network import NoNamespaces, why_not

__all__ = ["NoNamespaces", "Testbed", "why_not"]
