"The threads of the C++ backend: PyTorch's, as many as it may use, or its own; after a fork, from several threads."

import subprocess
import sys

import pytest
import torch
from dendritic_kernels import BlockLists, block_sparse_attention, cpp
from problems import check, problem, results

pytestmark = pytest.mark.skipif(cpp._library()[1] is not None, reason=f"C++ backend: {cpp._library()[1]}")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 1), (4, 2), (12, 12)])
def test_agrees_with_the_reference(threads, heads, kv_heads):
    "Also where heads are fewer than threads, so that their key blocks are shared out."
    for gated in (False, True):
        check("cpp", batch=1, heads=heads, kv_heads=kv_heads, seq=150, queries=101, dim=33, block=16, causal=True,
              padded=True, gated=gated)


def test_twice_the_same_bits(threads):
    q, k, v, mask = problem(seq=130, block=16)
    lists = BlockLists.from_mask(mask, 130, 16)
    run = lambda: results(lambda *x: block_sparse_attention(*x, lists, backend="cpp"), [q, k, v], q)
    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


BEGIN = """
import os, threading
import torch
from dendritic_kernels import BlockLists, block_sparse_attention
torch.manual_seed(0)
# so small that PyTorch itself starts no threads, whose own pool does not survive a fork
q, k, v = (torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3))
lists = BlockLists.from_mask(torch.rand(2, 3, 4, 4) < 0.5, 64, 16)
def run():
    out = block_sparse_attention(q, k, v, lists, backend="cpp")
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
torch.set_num_threads(1)
expected = run()
def right(): return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(run(), expected))
def tasks(): return len(os.listdir("/proc/self/task"))
def child(work):
    "0 where `work` is true in a forked process."
    if pid := os.fork(): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(not work())
"""


def in_a_process(script: str):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BEGIN + script], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_as_many_threads_as_pytorch_may_use():
    in_a_process("""
before = tasks()
torch.set_num_threads(4)
for _ in range(5): assert right()
assert tasks() == before + 3, (before, tasks())
torch.set_num_threads(2)
for _ in range(5): assert right()
assert tasks() <= before + 3, (before, tasks())
""")


@pytest.mark.skipif(cpp._openmp() is None, reason="PyTorch's OpenMP runtime was not found")
def test_no_threads_beside_those_of_pytorch():
    in_a_process("""
torch.set_num_threads(4)
large = torch.randn(512, 512)
large @ large, large.exp()
before = tasks()
assert right() and tasks() == before, (before, tasks())
""")


@pytest.mark.skipif(cpp._openmp() is None, reason="PyTorch's OpenMP runtime was not found")
def test_fewer_tasks_than_threads_end_no_threads():
    "Else PyTorch has to start them again."
    in_a_process("""
torch.set_num_threads(4)
large = torch.randn(512, 512)
one = BlockLists.from_mask(torch.ones(1, 2, 1, 1, dtype=torch.bool), 16, 16)
def both(): large.exp(), block_sparse_attention(q.detach()[:1, :2, :16], k.detach()[:1, :2, :16],
                                                v.detach()[:1, :2, :16], one, backend="cpp")
both()
before = set(os.listdir("/proc/self/task"))
for _ in range(5): both()
assert set(os.listdir("/proc/self/task")) == before
""")


def test_a_fork_before_the_library_is_loaded():
    "The child has none of the threads on which PyTorch computed."
    in_a_process("""
from dendritic_kernels import cpp
cpp._library.cache_clear()
torch.set_num_threads(4)
torch.randn(512, 512).exp()
assert child(right) == 0
""")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_threads_of_its_own():
    in_a_process("""
from dendritic_kernels import cpp
cpp._library()[0].use_openmp(None)
torch.set_num_threads(4)
before = tasks()
for _ in range(5): assert right()
torch.set_num_threads(2)
assert right() and tasks() == before + 3, (before, tasks())
assert child(lambda: right() and right()) == 0
""")


def test_a_forked_process_has_threads_of_its_own():
    in_a_process("""
torch.set_num_threads(4)
assert right()
assert child(lambda: right() and right() and child(right) == 0) == 0
assert right()
""")


def test_a_fork_while_another_thread_computes():
    in_a_process("""
torch.set_num_threads(4)
torch.autograd.set_multithreading_enabled(False)
stop = threading.Event()
def work():
    while not stop.is_set(): block_sparse_attention(q.detach(), k.detach(), v.detach(), lists, backend="cpp")
thread = threading.Thread(target=work)
thread.start()
forward = lambda: torch.allclose(block_sparse_attention(q.detach(), k.detach(), v.detach(), lists, backend="cpp"),
                                 expected[0], atol=1e-5)
for _ in range(20): assert child(forward) == 0
stop.set()
thread.join()
""")


def test_several_threads_at_once():
    in_a_process("""
torch.set_num_threads(3)
found = []
threads = [threading.Thread(target=lambda: found.extend(right() for _ in range(20))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [True] * 80
""")
