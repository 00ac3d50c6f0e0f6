// When each block came to which point of a kernel, for builds that are asked to tell.
#pragma once

#include "raymoe/base/ptx.cuh"

#ifndef TRACED
#define TRACED 0  // 1: the first thread of a block, or of a lane, stores the time at each point it comes to
#endif

namespace raymoe {

constexpr bool TRACES = TRACED;
constexpr u32 TRACE_POINTS = 16;  // of a block; a point that several threads come to holds the time of the last of them

// Points of dispatch.cu and dispatch_ll.cu; raymoe/device/trace.py names them.
constexpr u32 AT_START = 0;
constexpr u32 AT_DESTINATIONS = 1;   // senders: which ranks tokens go to is known
constexpr u32 AT_FIRST_PUSH = 2;     // senders, reducers: the first row, or piece of one, was pushed
constexpr u32 AT_LAST_PUSH = 3;      // likewise the last
constexpr u32 AT_ARRIVED = 4;        // senders, reducers: all that was pushed has arrived
constexpr u32 AT_SAID_DONE = 5;
constexpr u32 AT_TOLD = 6;           // routers: entries are numbered and told
constexpr u32 AT_COUNTS = 7;         // placers: the counts of all sources are here; summers: the statuses
constexpr u32 AT_PLANNED = 8;        // placers: where rows stand is known
constexpr u32 AT_FIRST_ROW = 9;      // placers, summers: the first row of a peer was there
constexpr u32 AT_LAST_ROW = 10;      // likewise the last
constexpr u32 AT_PLACED = 11;        // all of them stand in their places
constexpr u32 AT_END = 12;
constexpr u32 AT_ALL_AWAITED = 13;   // the last block out: no peer has anything more to send

__device__ __forceinline__ void trace(u64* times, u32 point) {
    if (TRACES) {
        times[blockIdx.x * TRACE_POINTS + point] = ptx::nanoseconds();
    }
}

// The first of several times.
__device__ __forceinline__ void trace_first(u64* times, u32 point) {
    if (TRACES && times[blockIdx.x * TRACE_POINTS + point] == 0) {
        trace(times, point);
    }
}

}  // namespace raymoe
