import time
from concurrent.futures import ThreadPoolExecutor

import torch

from megacompile.runtime.host import HostBuffer
from megacompile.runtime.rules import Rule, Update
from megacompile.runtime.update import compiled

torch.cuda.init()
n = 233_000_000


def mk(dt, pin, fill=True):
    size = torch.empty(0, dtype=dt).element_size()
    t = HostBuffer(n * size, pin=pin).bytes(n * size).view(dt)
    t.zero_()
    if fill:
        src = torch.randn(1 << 20).to(dt) * 1e-3
        if dt == torch.float32:
            src = src.abs() * 1e-3
        for k in range(0, n, 1 << 20):
            t[k : k + (1 << 20)] = src[: min(1 << 20, n - k)]
    return t


h = (1.0, 0.0, 0.999, 0.1, 0.999, 0.001, -1e-3, 1.0, 1e-8)
ex = ThreadPoolExecutor(1)


def time_of(u, where, reps=4, threads=None, dma=None):
    def f():
        if threads:
            torch.set_num_threads(threads)
        ts = []
        for _ in range(reps):
            t = time.time()
            compiled(Rule.ADAM)(u)
            ts.append(time.time() - t)
        return min(ts), sorted(ts)[len(ts) // 2], torch.get_num_threads()

    return f() if where == "main" else ex.submit(f).result()


def show(name, r):
    print(
        f"{name:40} min {r[0] / n * 1e9:.3f} med {r[1] / n * 1e9:.3f} s/B threads {r[2]}",
        flush=True,
    )


for pin, fill in ((False, False), (False, True), (True, True)):
    u = Update(
        mk(torch.bfloat16, pin, fill),
        mk(torch.bfloat16, pin, fill),
        (mk(torch.float32, False, fill), mk(torch.float32, False, fill), None),
        h,
    )
    show(f"main pin={pin} random={fill}", time_of(u, "main"))
    show(f"worker pin={pin} random={fill}", time_of(u, "worker"))
for t in (8, 12, 14, 15, 16):
    show(f"worker threads={t}", time_of(u, "worker", threads=t))
torch.set_num_threads(16)
# split over 12 tensors of layer sizes
sizes = [3584 * 18944] * 3 + [3584 * 3584] * 2 + [3584 * 512] * 2 + [3584] * 3 + [512] * 2


def parts(t):
    out = []
    o = 0
    for s in sizes:
        out.append(t[o : o + s])
        o += s
    return out


us = [
    Update(a, b, (c, d, None), h)
    for a, b, c, d in zip(parts(u.param), parts(u.grad), parts(u.states[0]), parts(u.states[1]))
]


def all12():
    ts = []
    for _ in range(4):
        t = time.time()
        for x in us:
            compiled(Rule.ADAM)(x)
        ts.append(time.time() - t)
    return min(ts), sorted(ts)[2], torch.get_num_threads()


show("main 12 params", all12())
show("worker 12 params", ex.submit(all12).result())
# with dma
dev = torch.empty(466_000_000, dtype=torch.uint8, device="cuda")
st = torch.cuda.Stream()
src = u.param.view(torch.uint8)[:466_000_000]
fut = ex.submit(all12)
with torch.cuda.stream(st):
    for _ in range(8):
        dev.copy_(src, non_blocking=True)
show("worker 12 + dma", fut.result())
p = u.param.float()
g = p.clone()
m = torch.zeros(n)
v = torch.zeros(n)
s = torch.tensor(1.0)
for _ in range(3):
    t = time.time()
    torch._fused_adamw_(
        [p],
        [g],
        [m],
        [v],
        [],
        [s],
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    dt = time.time() - t
print("fused fp32", dt / n * 1e9)
