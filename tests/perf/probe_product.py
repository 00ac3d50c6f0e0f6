"""Probe of kernels/moe/product.cu on one GPU: right results, then times beside grouped_mm and a dense product."""
import ctypes, json, os, sys, time
import torch
from cuda.bindings import driver as d
from raymoe.cuda.jit import Compiler
from raymoe.moe.products import FEW, MANY, THREADS, Gate, Product, TileClass

def ok(r):
    code, *rest = r
    assert int(code) == 0, code
    return rest[0] if rest else None

DEV = torch.device("cuda", 0)
torch.zeros(1, device=DEV)
SMS = torch.cuda.get_device_properties(0).multi_processor_count
OUT = open(os.path.join(os.environ.get("OUT", "."), "product.jsonl"), "a")

class Build:
    """One build of the kernel, launched by the driver."""

    def __init__(self, tiles, gate=None, **extra):
        self.tiles, self.gate, self.extra = tiles, gate, extra
        self.counter = torch.zeros(64, dtype=torch.int32, device=DEV)
        self.compiled = self.f = None

    def prepare(self, x, w, offsets, counts, y, sms=SMS):
        product = Product(x, w, offsets, counts, y, gate=self.gate, tiles=self.tiles, **self.extra)
        product.check()
        if self.f is None:
            t = time.time()
            self.compiled = Compiler().compiled(product.source(), "sm_90a")
            print("compiled", product.source().defines, round(time.time() - t, 1), "s", flush=True)
            self.f = ok(d.cuModuleGetFunction(ok(d.cuModuleLoadData(self.compiled.cubin)), b"product"))
        first, second, tokens = product.maps()
        encoded = first.encoded(), second.encoded(), tuple(each.encoded() for each in tokens)
        fields = product.params(encoded, self.counter.data_ptr()).packed()
        ptrs = (ctypes.c_void_p * 1)(ctypes.addressof(fields))
        shared = self.tiles.shared_bytes(w.shape[0])
        ok(d.cuFuncSetAttribute(self.f, d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))
        c = d.CUlaunchConfig()
        c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ = sms, 1, 1, THREADS, 1, 1
        c.sharedMemBytes, c.numAttrs = shared, 0
        keep = fields, ptrs, x, w, offsets, counts, y, product

        def run(keep=keep):
            c.hStream = torch.cuda.current_stream().cuda_stream
            ok(d.cuLaunchKernelEx(c, self.f, ctypes.addressof(keep[1]), 0))

        return run

    @property
    def gated(self):
        return self.gate is not None


def layout(rows, align=16):
    off, o = [0], 0
    for r in rows:
        o += -(-r // align) * align
        off.append(o)
    return torch.tensor(off, dtype=torch.int32, device=DEV), torch.tensor(rows, dtype=torch.int32, device=DEV), max(o, 16)

def reference(x, w, offsets, counts, gated):
    y = torch.full((x.shape[0], w.shape[1] // (2 if gated else 1)), float("nan"), device=DEV)
    for e, (o, n) in enumerate(zip(offsets.tolist(), counts.tolist())):
        if n:
            p = x[o:o + n].float() @ w[e].float().T
            if gated:
                g, u = p.chunk(2, 1)
                p = torch.nn.functional.silu(g) * u
            y[o:o + n] = p
    return y

def check(product, rows, N, K):
    torch.manual_seed(1)
    offsets, counts, C = layout(rows)
    x = torch.randn(C, K, device=DEV).bfloat16(); w = (torch.randn(len(rows), N, K, device=DEV) / K**.5).bfloat16()
    y = torch.full((C, N // (2 if product.gated else 1)), float("nan"), device=DEV, dtype=torch.bfloat16)
    run = product.prepare(x, w, offsets, counts, y)
    for _ in range(3): run()
    torch.cuda.synchronize()
    want = reference(x, w, offsets, counts, product.gated)
    there = ~want.isnan()
    err = (y.float() - want).abs()[there].max().item() if there.any() else 0.0
    spread = int((~y.isnan() & ~there).sum()); missing = int((y.isnan() & there).sum())
    print("check", product.tiles, product.gated, len(rows), max(rows), N, K, "max error", err, "spread", spread, "missing", missing, flush=True)
    return err < 0.05 and not spread and not missing

def times(runs, count=10):
    for r in runs.values(): r(); r()
    torch.cuda.synchronize()
    out = {k: [] for k in runs}
    for _ in range(count):
        for k, r in runs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); r(); b.record(); torch.cuda.synchronize()
            out[k].append(a.elapsed_time(b) * 1e3)
    return {k: round(sorted(v)[len(v) // 2], 1) for k, v in out.items()}

def bench(name, rows, N, K, products, gated=False, dense=True):
    offsets, counts, C = layout(rows)
    x = torch.randn(C, K, device=DEV).bfloat16(); w = torch.empty(len(rows), N, K, device=DEV, dtype=torch.bfloat16).normal_(0, K**-.5)
    outs = N // 2 if gated else N
    y = torch.empty(C, outs, device=DEV, dtype=torch.bfloat16)
    total = sum(rows)
    wt = w.transpose(1, 2)
    runs = {"grouped_mm": lambda: torch._grouped_mm(x, wt, offs=offsets[1:])}
    if dense:
        xd = torch.randn(total, K, device=DEV).bfloat16(); wd = w[0]
        runs["dense"] = lambda: torch.mm(xd, wd.T)
    for k, p in products.items():
        runs[k] = p.prepare(x, w, offsets, counts, y)
    t = times(runs)
    tf = {k: round(2 * total * N * K / v / 1e6, 0) for k, v in t.items()}
    line = {"name": name, "experts": len(rows), "rows": total // max(1, sum(r > 0 for r in rows)), "N": N, "K": K, "us": t, "tf": tf}
    print(json.dumps(line), flush=True); OUT.write(json.dumps(line) + "\n"); OUT.flush()

def uniform(experts, mean, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.bincount(torch.randint(0, experts, (experts * mean,), generator=g), minlength=experts).tolist()

if __name__ == "__main__":
    P = {}
    P["m176"] = Build(MANY)
    P["m128"] = Build(TileClass(128, 4))
    P["m64"] = Build(FEW)
    G = Build(MANY, gate=Gate())
    good = True
    for prod in (P["m64"], P["m128"], P["m176"], G):
        for rows in ([1], [8, 0, 3], [0, 16, 17, 1], [137, 300, 0, 1, 64, 65], [700]):
            good &= check(prod, rows, 512, 448 if prod is not G else 512)
        good &= check(prod, [33, 190], 768 + 16 if not prod.gated else 2 * (384 + 16), 1000 // 8 * 8)
    print("GOOD" if good else "WRONG", flush=True)
    if not good: sys.exit(1)
    for mean in (256, 512, 128, 64, 1024, 32, 8):
        bench(f"uniform {mean}", uniform(64, mean), 4096, 7168, P, dense=True)
    for mean in (256, 512, 128):
        bench(f"down uniform {mean}", uniform(64, mean), 7168, 2048, P)
    for r in (256, 272, 512, 1024): bench(f"equal {r}", [r] * 64, 4096, 7168, P)
    bench("hot", [4] * 31 + [1024] + [4] * 32, 4096, 7168, P)
    bench("gated uniform 256", uniform(64, 256), 4096, 7168, {"gated": G}, gated=True)
