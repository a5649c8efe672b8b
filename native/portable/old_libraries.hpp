// SPDX-License-Identifier: Apache-2.0
// Included before everything else where KERAS_HPC_PORTABLE is set, as in wheels (manylinux_2_34): what newer libraries
// have in two versions is bound to the older one, which is the same function, so that GCC 11's libstdc++ is enough.
#pragma once

// std::condition_variable::wait(std::unique_lock<std::mutex>&), which is noexcept since GCC 12.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
