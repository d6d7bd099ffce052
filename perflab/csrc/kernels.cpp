// The kernels for one instruction set; compiled once for each, with ISA and flags of its own.
#include "attention.h"
#include "linear.h"
#include "rows.h"

#define PL_NAME_OF(isa) #isa
#define PL_NAME(isa) PL_NAME_OF(isa)

namespace ISA {
extern const Kernels kernels;
const Kernels kernels = {PL_NAME(ISA), MAX_M,    linear,  prepare,           rotate, write_kv,
                         attention,    combine,  attention_scratch, argmax, finite};
}  // namespace ISA
