"""What to say where ranks of several machines cannot connect.

gloo offers other ranks the first address that its machine's name leads to, which need not be one that they reach: the
installers of Debian and Ubuntu write `127.0.1.1 NAME` into /etc/hosts, and there every machine finds itself.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

_REFUSED = re.compile(r"Gloo connectFullMesh failed .*remote=\[([^\]]*)\]", re.DOTALL)


@contextmanager
def explained() -> Iterator[None]:
    """Around the forming of a process group. A note only: the other rank may as well have ended for a reason of its
    own, and another attempt may do.
    """
    try:
        yield
    except RuntimeError as error:
        if refused := _REFUSED.search(str(error)):
            error.add_note(
                f"Another rank offered the address {refused[1]}, and this one cannot connect to it. If that rank has "
                "not ended by itself, the name of its machine leads to an address that this machine does not reach (of "
                "127.0.1.1, say, to itself: see /etc/hosts there). Set GLOO_SOCKET_IFNAME on every machine, and "
                "NCCL_SOCKET_IFNAME for GPUs, to the network interface that leads to the other machines, as eth0: "
                "`ip route get ADDRESS` of another machine names it behind `dev`."
            )
        raise
