// The times at which each block reaches the points of a kernel, in builds that trace.
#pragma once

#include "raymoe/base/ptx.cuh"

#ifndef TRACED
#define TRACED 0  // 1: the first thread of a block, or of a warp, stores the time at each point that it reaches
#endif

namespace raymoe {

constexpr bool TRACES = TRACED;
constexpr u32 TRACE_POINTS = 16;  // of a block; if several threads reach a point, it holds the time of the last one

// Points of dispatch.cu and dispatch_ll.cu; raymoe/exchange/peer/trace.py names them.
constexpr u32 AT_START = 0;
constexpr u32 AT_DESTINATIONS = 1;       // senders: the ranks of tokens are known
constexpr u32 AT_FIRST_PUSH = 2;         // senders, local reduction: the first row, or piece of one, was pushed
constexpr u32 AT_LAST_PUSH = 3;          // likewise the last
constexpr u32 AT_ARRIVED = 4;            // senders, local reduction: all that was pushed has arrived
constexpr u32 AT_SAID_DONE = 5;          // senders, local reduction: done is announced
constexpr u32 AT_ENTRIES_PUBLISHED = 6;  // counting blocks: routing entries are numbered and stored at every rank
constexpr u32 AT_COUNTS = 7;             // placement: the counts of all sources have come; final reduction: statuses
constexpr u32 AT_PLANNED = 8;            // placement: the places of the rows are known
constexpr u32 AT_FIRST_ROW = 9;          // placement, final reduction: the first row of a peer has come
constexpr u32 AT_LAST_ROW = 10;          // likewise the last
constexpr u32 AT_PLACED = 11;            // placement, final reduction: all rows are stored
constexpr u32 AT_END = 12;
constexpr u32 AT_ALL_AWAITED = 13;       // the last block out: no peer has anything more to send

__device__ __forceinline__ void trace(u64* times, u32 point) {
    if (TRACES) {
        times[blockIdx.x * TRACE_POINTS + point] = ptx::nanoseconds();
    }
}

// Stores only the first of several times.
__device__ __forceinline__ void trace_first(u64* times, u32 point) {
    if (TRACES && times[blockIdx.x * TRACE_POINTS + point] == 0) {
        trace(times, point);
    }
}

}  // namespace raymoe
