/* What Python cannot do fast enough: MD5 of several streams at once, and long writes without the GIL.
 *
 * MD5 (RFC 1321) of up to sixteen buffers at once: one buffer per SIMD lane.
 *
 * MD5 is one long chain of dependent steps, so a single stream leaves most of a core idle; sixteen
 * independent streams fill it. GCC's vector types and target_clones pick AVX-512, AVX2 or SSE at load time.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define LANES 16
typedef uint32_t quad __attribute__((vector_size(16)));

static const uint32_t K[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a,
    0xa8304613, 0xfd469501, 0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be,
    0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821, 0xf61e2562, 0xc040b340,
    0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8,
    0x676f02d9, 0x8d2a4c8a, 0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c,
    0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70, 0x289b7ec6, 0xeaa127fa,
    0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92,
    0xffeff47d, 0x85845dd1, 0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1,
    0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391};
static const int SHIFT[4][4] = {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}};
static const uint32_t START[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};

/* The 64 steps; T is uint32_t for one stream, or a vector with one lane for each. */
#define STEPS(T, s, w)                                                                     \
    do {                                                                                   \
        T a = (s)[0], b = (s)[1], c = (s)[2], d = (s)[3];                                  \
        _Pragma("GCC unroll 64") for (int i = 0; i < 64; i++) {                            \
            int round = i / 16, at;                                                        \
            T f;                                                                           \
            switch (round) {                                                               \
            case 0: f = d ^ (b & (c ^ d)); at = i; break;                                  \
            case 1: f = c ^ (d & (b ^ c)); at = (5 * i + 1) % 16; break;                   \
            case 2: f = b ^ c ^ d; at = (3 * i + 5) % 16; break;                           \
            default: f = c ^ (b | ~d); at = (7 * i) % 16; break;                           \
            }                                                                              \
            f = f + (a + (K[i] + (w)[at]));                                                \
            a = d, d = c, c = b;                                                           \
            b = b + ((f << SHIFT[round][i % 4]) | (f >> (32 - SHIFT[round][i % 4])));      \
        }                                                                                  \
        (s)[0] += a, (s)[1] += b, (s)[2] += c, (s)[3] += d;                                \
    } while (0)

/* Each lane's 16 words of a block are read as four rows of four, which are turned into columns within
   each 128-bit part: cheap in every instruction set. More lanes than are asked for cost time too, so
   there are three widths. */
#define RUN(NAME, N)                                                                               \
    __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"))) static void NAME(          \
        uint32_t states[LANES][4], const uint8_t *data[LANES], size_t blocks)                      \
    {                                                                                              \
        typedef uint32_t T __attribute__((vector_size(4 * N)));                                    \
        T s[4], w[16], low, high, even, odd;                                                       \
        for (int i = 0; i < 4; i++)                                                                \
            for (int lane = 0; lane < N; lane++)                                                   \
                s[i][lane] = states[lane][i];                                                      \
        for (int l = 0; l < N; l += 4) {                                                           \
            low[l] = l, low[l + 1] = l + N, low[l + 2] = l + 1, low[l + 3] = l + 1 + N;            \
            high[l] = l + 2, high[l + 1] = l + 2 + N, high[l + 2] = l + 3, high[l + 3] = l + 3 + N; \
            even[l] = l, even[l + 1] = l + 1, even[l + 2] = l + N, even[l + 3] = l + 1 + N;        \
            odd[l] = l + 2, odd[l + 1] = l + 3, odd[l + 2] = l + 2 + N, odd[l + 3] = l + 3 + N;    \
        }                                                                                          \
        for (size_t block = 0; block < blocks; block++) {                                          \
            _Pragma("GCC unroll 4") for (int q = 0; q < 4; q++) {                                  \
                union { T whole; quad part[N / 4]; } row[4];                                       \
                _Pragma("GCC unroll 16") for (int lane = 0; lane < N; lane++)                      \
                    memcpy(&row[lane % 4].part[lane / 4], data[lane] + 64 * block + 16 * q, 16);   \
                T x0 = __builtin_shuffle(row[0].whole, row[1].whole, low);                         \
                T x1 = __builtin_shuffle(row[0].whole, row[1].whole, high);                        \
                T y0 = __builtin_shuffle(row[2].whole, row[3].whole, low);                         \
                T y1 = __builtin_shuffle(row[2].whole, row[3].whole, high);                        \
                w[4 * q] = __builtin_shuffle(x0, y0, even);                                        \
                w[4 * q + 1] = __builtin_shuffle(x0, y0, odd);                                     \
                w[4 * q + 2] = __builtin_shuffle(x1, y1, even);                                    \
                w[4 * q + 3] = __builtin_shuffle(x1, y1, odd);                                     \
            }                                                                                      \
            STEPS(T, s, w);                                                                        \
        }                                                                                          \
        for (int i = 0; i < 4; i++)                                                                \
            for (int lane = 0; lane < N; lane++)                                                   \
                states[lane][i] = s[i][lane];                                                      \
    }
RUN(run_4, 4)
RUN(run_8, 8)
RUN(run_16, 16)

static void run_lanes(uint32_t states[LANES][4], const uint8_t *data[LANES], size_t blocks, Py_ssize_t count)
{
    (count <= 4 ? run_4 : count <= 8 ? run_8 : run_16)(states, data, blocks);
}

static void run_one(uint32_t state[4], const uint8_t *data)
{
    uint32_t w[16];
    memcpy(w, data, 64);
    STEPS(uint32_t, state, w);
}

/* What is left of one stream after `done` bytes, then the padding. */
static void finish_one(uint32_t state[4], const uint8_t *data, size_t size, size_t done)
{
    uint8_t tail[128] = {0};
    uint64_t bits = (uint64_t)size * 8;
    for (; size - done >= 64; done += 64)
        run_one(state, data + done);
    size_t rest = size - done, padded = rest < 56 ? 64 : 128;
    memcpy(tail, data + done, rest);
    tail[rest] = 0x80;
    memcpy(tail + padded - 8, &bits, 8);
    for (size_t at = 0; at < padded; at += 64)
        run_one(state, tail + at);
}

static PyObject *md5_many(PyObject *self, PyObject *args)
{
    PyObject *list, *result = NULL;
    Py_buffer views[LANES];
    uint32_t states[LANES][4];
    const uint8_t *data[LANES];
    Py_ssize_t count, taken = 0;
    size_t common = SIZE_MAX;

    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list))
        return NULL;
    count = PyList_GET_SIZE(list);
    if (count < 1 || count > LANES)
        return PyErr_Format(PyExc_ValueError, "1 to %d buffers, not %zd", LANES, count);
    for (; taken < count; taken++) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(list, taken), &views[taken], PyBUF_SIMPLE) < 0)
            goto done;
        if ((size_t)views[taken].len / 64 < common)
            common = (size_t)views[taken].len / 64;
    }
    for (int lane = 0; lane < LANES; lane++) {
        memcpy(states[lane], START, sizeof START);
        data[lane] = views[lane < count ? lane : 0].buf;
    }
    Py_BEGIN_ALLOW_THREADS;
    run_lanes(states, data, common, count);
    for (int lane = 0; lane < count; lane++)
        finish_one(states[lane], data[lane], (size_t)views[lane].len, common * 64);
    Py_END_ALLOW_THREADS;
    result = PyList_New(count);
    for (Py_ssize_t lane = 0; result && lane < count; lane++) {
        PyObject *digest = PyBytes_FromStringAndSize((const char *)states[lane], 16);
        if (!digest)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, lane, digest);
    }
done:
    while (taken--)
        PyBuffer_Release(&views[taken]);
    return result;
}

/* All of these buffers into their states, as far as whole blocks go; the lengths are multiples of 64. */
static PyObject *md5_extend(PyObject *self, PyObject *args)
{
    PyObject *state_list, *list, *result = NULL;
    Py_buffer views[LANES], kept[LANES];
    uint32_t states[LANES][4];
    const uint8_t *data[LANES];
    Py_ssize_t count, taken = 0, opened = 0;
    size_t common = SIZE_MAX;

    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &state_list, &PyList_Type, &list))
        return NULL;
    count = PyList_GET_SIZE(list);
    if (count < 1 || count > LANES || PyList_GET_SIZE(state_list) != count)
        return PyErr_Format(PyExc_ValueError, "1 to %d states and as many buffers", LANES);
    for (; opened < count; opened++) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(state_list, opened), &kept[opened], PyBUF_WRITABLE) < 0)
            goto done;
        if (kept[opened].len != 16) {
            PyErr_SetString(PyExc_ValueError, "a state has 16 bytes");
            opened++;
            goto done;
        }
    }
    for (; taken < count; taken++) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(list, taken), &views[taken], PyBUF_SIMPLE) < 0)
            goto done;
        if (views[taken].len % 64) {
            PyErr_SetString(PyExc_ValueError, "lengths must be multiples of 64");
            taken++;
            goto done;
        }
        if ((size_t)views[taken].len / 64 < common)
            common = (size_t)views[taken].len / 64;
    }
    for (int lane = 0; lane < LANES; lane++) {
        memcpy(states[lane], kept[lane < count ? lane : 0].buf, 16);
        data[lane] = views[lane < count ? lane : 0].buf;
    }
    Py_BEGIN_ALLOW_THREADS;
    if (count == 1)
        common = 0;
    else
        run_lanes(states, data, common, count);
    for (int lane = 0; lane < count; lane++)
        for (size_t at = common * 64; at < (size_t)views[lane].len; at += 64)
            run_one(states[lane], data[lane] + at);
    Py_END_ALLOW_THREADS;
    for (int lane = 0; lane < count; lane++)
        memcpy(kept[lane].buf, states[lane], 16);
    result = Py_NewRef(Py_None);
done:
    while (taken--)
        PyBuffer_Release(&views[taken]);
    while (opened--)
        PyBuffer_Release(&kept[opened]);
    return result;
}

/* The digest of a stream of `total` bytes whose last, shorter than a block, are `tail`. */
static PyObject *md5_finish(PyObject *self, PyObject *args)
{
    Py_buffer kept, tail;
    unsigned long long total;
    uint32_t state[4];
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(args, "y*y*K", &kept, &tail, &total))
        return NULL;
    if (kept.len != 16 || tail.len >= 64 || (unsigned long long)tail.len != total % 64) {
        PyErr_SetString(PyExc_ValueError, "a state of 16 bytes and a tail of total % 64");
    } else {
        uint8_t padded[128] = {0};
        size_t size = tail.len < 56 ? 64 : 128;
        uint64_t bits = (uint64_t)total * 8;
        memcpy(state, kept.buf, 16);
        memcpy(padded, tail.buf, tail.len);
        padded[tail.len] = 0x80;
        memcpy(padded + size - 8, &bits, 8);
        for (size_t at = 0; at < size; at += 64)
            run_one(state, padded + at);
        result = PyBytes_FromStringAndSize((const char *)state, 16);
    }
    PyBuffer_Release(&kept);
    PyBuffer_Release(&tail);
    return result;
}

/* pwrite(2) of all of it in steps, the GIL given up once and not once per step. With `align`, each
   step goes through memory aligned to that many bytes, as O_DIRECT asks for. */
static PyObject *write_steps(PyObject *self, PyObject *args)
{
    int fd, failed = 0;
    Py_buffer body;
    long long offset;
    Py_ssize_t step, align, done = 0;
    void *aligned = NULL;

    if (!PyArg_ParseTuple(args, "iy*Lnn", &fd, &body, &offset, &step, &align))
        return NULL;
    /* Memory that is aligned already needs no copy, and no small steps to keep one in the cache. */
    if (align && ((uintptr_t)body.buf % align || step % align))
        failed = posix_memalign(&aligned, (size_t)align, (size_t)step);
    else if (align)
        step *= 16;
    Py_BEGIN_ALLOW_THREADS;
    while (done < body.len && !failed) {
        size_t want = body.len - done < step ? (size_t)(body.len - done) : (size_t)step;
        const char *from = (const char *)body.buf + done;
        if (aligned)
            from = memcpy(aligned, from, want);
        ssize_t wrote = pwrite(fd, from, want, offset + done);
        if (wrote >= 0)
            done += wrote;
        else if (errno != EINTR)
            failed = errno;
    }
    Py_END_ALLOW_THREADS;
    free(aligned);
    PyBuffer_Release(&body);
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"md5_many", md5_many, METH_VARARGS, "md5_many(buffers: list) -> list[bytes], for 1 to 16 buffers"},
    {"md5_extend", md5_extend, METH_VARARGS, "md5_extend(states: list[bytearray], buffers: list) -> None"},
    {"md5_finish", md5_finish, METH_VARARGS, "md5_finish(state, tail, total: int) -> bytes"},
    {"write_steps", write_steps, METH_VARARGS, "write_steps(fd, body, offset, step, align) -> None"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
