/* Elements that lie together, and are read and written together. */
#pragma once

template <int COUNT> struct alignas(COUNT * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[COUNT]; };
