/* The replay's loops in C: see sum_tree.py and windows.py, which say what each function does and have the same in
   numpy. */

#define IMPORTS_NUMPY
#include "_native.h"

/* The trees of sums and of maxima, each an array of 2 * size numbers: see sum_tree.py. */
typedef struct {
    double *sum, *max;
    npy_intp size;
} Tree;

static int read_tree(Arguments arguments, Tree *tree) {
    PyArrayObject *sum, *max;
    if (!read_line(arguments[0], NPY_FLOAT64, &sum) || !read_line(arguments[1], NPY_FLOAT64, &max)) {
        return 0;
    }
    if (PyArray_SIZE(sum) != PyArray_SIZE(max) || PyArray_SIZE(sum) < 2) {
        PyErr_SetString(PyExc_ValueError, "both trees must have the same size");
        return 0;
    }
    *tree = (Tree){PyArray_DATA(sum), PyArray_DATA(max), PyArray_SIZE(sum) / 2};
    return 1;
}

static inline void recompute(const Tree *tree, npy_intp node) {
    const double *sum = tree->sum + 2 * node, *max = tree->max + 2 * node;
    tree->sum[node] = sum[0] + sum[1];
    tree->max[node] = max[0] > max[1] ? max[0] : max[1];
}

/* Compute the ancestors of some leaves, level by level: the children of a level are complete before it. Levels that have
   fewer nodes than there are leaves are computed as a whole. */
static void recompute_above(const Tree *tree, const npy_int64 *leaf, npy_intp count) {
    for (int level = 1; tree->size >> level; level++) {
        npy_intp width = tree->size >> level;
        for (npy_intp i = 0; i < (width < count ? width : count); i++) {
            recompute(tree, width < count ? width + i : (tree->size + leaf[i]) >> level);
        }
    }
}

/* tree_update(sum, max, leaves, values) */
static PyObject *tree_update(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Tree tree;
    PyArrayObject *leaves, *values;
    if (!check_arguments(n, 4) || !read_line(arguments[2], NPY_INT64, &leaves) ||
        !read_line(arguments[3], NPY_FLOAT64, &values) || !read_tree(arguments, &tree)) {
        return NULL;
    }
    npy_intp count = PyArray_SIZE(leaves);
    const npy_int64 *leaf = PyArray_DATA(leaves);
    const double *value = PyArray_DATA(values);
    for (npy_intp i = 0; i < count; i++) {
        if (leaf[i] < 0 || leaf[i] >= tree.size || PyArray_SIZE(values) != count) {
            PyErr_SetString(PyExc_IndexError, "a leaf is out of range, or the numbers of leaves and values differ");
            return NULL;
        }
    }
    for (npy_intp i = 0; i < count; i++) {
        tree.sum[tree.size + leaf[i]] = tree.max[tree.size + leaf[i]] = value[i];
    }
    recompute_above(&tree, leaf, count);
    Py_RETURN_NONE;
}

/* tree_assign(sum, max, n_leaves, low, high, places, priorities, values) */
static PyObject *tree_assign(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Tree tree;
    PyArrayObject *places, *priorities, *values;
    if (!check_arguments(n, 8) || !read_line(arguments[5], NPY_INT64, &places) ||
        !read_line(arguments[6], NPY_FLOAT64, &priorities) || !read_line(arguments[7], NPY_FLOAT64, &values) ||
        !read_tree(arguments, &tree)) {
        return NULL;
    }
    npy_intp n_leaves = PyNumber_AsSsize_t(arguments[2], PyExc_IndexError);
    npy_intp low = PyNumber_AsSsize_t(arguments[3], PyExc_IndexError);
    npy_intp high = PyNumber_AsSsize_t(arguments[4], PyExc_IndexError), count = PyArray_SIZE(places), n_kept = 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (n_leaves < 1 || n_leaves > tree.size || low < 0 || high < low || high - low > n_leaves ||
        PyArray_SIZE(priorities) != count || PyArray_SIZE(values) != count) {
        return PyErr_Format(PyExc_ValueError, "the sizes of the tree and the arrays do not fit together");
    }
    const npy_int64 *place = PyArray_DATA(places);
    const double *priority = PyArray_DATA(priorities), *value = PyArray_DATA(values);
    npy_int64 *leaf = PyMem_Malloc((size_t)count * sizeof(*leaf) + 1), first = low - low % n_leaves;
    if (leaf == NULL) {
        return PyErr_NoMemory();
    }
    for (npy_intp i = 0; i < count; i++) {
        if (place[i] < 0 || place[i] >= high || !(priority[i] > 0 && priority[i] < Py_HUGE_VAL) ||
            !(value[i] > 0 && value[i] <= 1e290)) { /* MOST in sum_tree.py */
            PyMem_Free(leaf);
            return PyLong_FromLong(-1);
        }
        if (place[i] >= low) {
            npy_int64 in_tree = place[i] - first;
            in_tree -= in_tree >= n_leaves ? n_leaves : 0;
            if (tree.sum[tree.size + in_tree] == 0) {
                PyMem_Free(leaf);
                return PyLong_FromLong(-1);
            }
            leaf[n_kept++] = in_tree;
        }
    }
    /* Of equal places, the largest value counts. */
    for (npy_intp k = 0; k < n_kept; k++) {
        tree.sum[tree.size + leaf[k]] = 0;
    }
    for (npy_intp i = 0, k = 0; i < count; i++) {
        if (place[i] >= low) {
            npy_intp node = tree.size + leaf[k++];
            if (value[i] > tree.sum[node]) {
                tree.sum[node] = tree.max[node] = value[i];
            }
        }
    }
    recompute_above(&tree, leaf, n_kept);
    PyMem_Free(leaf);
    return PyLong_FromSsize_t(count - n_kept);
}

/* tree_range(sum, max, first, values) */
static PyObject *tree_range(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Tree tree;
    PyArrayObject *values;
    if (!check_arguments(n, 4) || !read_line(arguments[3], NPY_FLOAT64, &values) || !read_tree(arguments, &tree)) {
        return NULL;
    }
    npy_intp first = PyNumber_AsSsize_t(arguments[2], PyExc_IndexError), count = PyArray_SIZE(values);
    if (first < 0 || first > tree.size - count) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "the range is not within the leaves");
    }
    if (count == 0) {
        Py_RETURN_NONE;
    }
    npy_intp low = tree.size + first, high = low + count - 1;
    memcpy(tree.sum + low, PyArray_DATA(values), count * sizeof(double));
    memcpy(tree.max + low, PyArray_DATA(values), count * sizeof(double));
    while (low > 1) {
        low >>= 1;
        high >>= 1;
        for (npy_intp node = low; node <= high; node++) {
            recompute(&tree, node);
        }
    }
    Py_RETURN_NONE;
}

/* tree_draw(sum, mass, n_leaves, low, places) */
static PyObject *tree_draw(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    PyArrayObject *tree, *masses, *places;
    if (!check_arguments(n, 5) || !read_line(arguments[0], NPY_FLOAT64, &tree) ||
        !read_line(arguments[1], NPY_FLOAT64, &masses) || !read_line(arguments[4], NPY_INT64, &places)) {
        return NULL;
    }
    npy_intp n_leaves = PyNumber_AsSsize_t(arguments[2], PyExc_IndexError);
    npy_intp low = PyNumber_AsSsize_t(arguments[3], PyExc_IndexError);
    if (PyErr_Occurred()) {
        return NULL;
    }
    npy_intp count = PyArray_SIZE(masses), size = PyArray_SIZE(tree) / 2;
    if (PyArray_SIZE(places) != count || size < 1 || n_leaves < 1 || n_leaves > size || low < 0) {
        PyErr_SetString(PyExc_ValueError, "there must be one mass for each place, and a tree");
        return NULL;
    }
    const double *sum = PyArray_DATA(tree);
    double *mass = PyArray_DATA(masses);
    npy_int64 *node = PyArray_DATA(places);
    for (npy_intp i = 0; i < count; i++) {
        node[i] = 1;
    }
    /* All draws go down one level together, so that the processor loads many nodes at once. */
    for (npy_intp width = 1; width < size; width *= 2) {
        for (npy_intp i = 0; i < count; i++) {
            npy_int64 left = 2 * node[i];
            double of_left = sum[left];
            npy_int64 goes_right = (mass[i] >= of_left) & (sum[left + 1] > 0); /* without a branch */
            mass[i] -= of_left * (double)goes_right;
            node[i] = left + goes_right;
            PREFETCH(sum + 2 * node[i]);
        }
    }
    npy_int64 first = low % n_leaves;
    for (npy_intp i = 0; i < count; i++) {
        npy_int64 after = node[i] - size - first;
        node[i] = low + after + (after < 0 ? n_leaves : 0);
    }
    Py_RETURN_NONE;
}

/* tree_ratios(sum, n_leaves, places, ratios) */
static PyObject *tree_ratios(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    PyArrayObject *tree, *places, *ratios;
    if (!check_arguments(n, 4) || !read_line(arguments[0], NPY_FLOAT64, &tree) ||
        !read_line(arguments[2], NPY_INT64, &places) || !read_line(arguments[3], NPY_FLOAT64, &ratios)) {
        return NULL;
    }
    npy_intp n_leaves = PyNumber_AsSsize_t(arguments[1], PyExc_IndexError);
    npy_intp count = PyArray_SIZE(places), size = PyArray_SIZE(tree) / 2;
    if (PyArray_SIZE(ratios) != count || n_leaves < 1 || n_leaves > size) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there must be one ratio for each place, and a tree");
    }
    const double *leaf = (const double *)PyArray_DATA(tree) + size;
    const npy_int64 *place = PyArray_DATA(places);
    double *ratio = PyArray_DATA(ratios), least = Py_HUGE_VAL;
    for (npy_intp i = 0; i < count; i++) {
        npy_int64 in_tree = place[i] % n_leaves;
        ratio[i] = leaf[in_tree < 0 ? in_tree + n_leaves : in_tree];
        least = ratio[i] < least ? ratio[i] : least;
    }
    for (npy_intp i = 0; i < count; i++) {
        ratio[i] /= least;
    }
    Py_RETURN_NONE;
}

/* ---- windows ----------------------------------------------------------------------------------- */

enum { N_AHEAD = 8 }; /* windows whose first rows are loaded before they are read */

/* The step that continues a step which is CUT, from position `from` on, or -1 if there is none. -2: it is not written yet,
   since `limit` is the first position that is not. */
static npy_int64 resumed_at(const npy_uint8 *flags, npy_intp size, npy_int64 from, npy_intp B, npy_int64 limit) {
    for (; from < limit; from += B) {
        if (flags[from % size] & VALID) {
            return flags[from % size] & RESUMES ? from : -1;
        }
    }
    return -2;
}

/* read_windows(flags, reward, positions, powers, B, limit, at, last, after, return, discount, end, eligible) */
static PyObject *read_windows(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    /* The dtypes of the arguments; -1: B and limit, which are numbers. */
    static const int types[] = {NPY_UINT8, NPY_FLOAT32, NPY_INT64,   NPY_FLOAT64, -1,        -1,      NPY_INT64,
                                NPY_INT64, NPY_INT64,   NPY_FLOAT32, NPY_FLOAT32, NPY_UINT8, NPY_BOOL};
    enum { N_ARGUMENTS = sizeof(types) / sizeof(*types) };
    void *data[N_ARGUMENTS];
    npy_intp sizes[N_ARGUMENTS];
    if (!check_arguments(n_arguments, N_ARGUMENTS)) {
        return NULL;
    }
    for (int i = 0; i < N_ARGUMENTS; i++) {
        PyArrayObject *array = NULL;
        if (types[i] >= 0 && !read_line(arguments[i], types[i], &array)) {
            return NULL;
        }
        data[i] = array == NULL ? NULL : PyArray_DATA(array);
        sizes[i] = array == NULL ? 0 : PyArray_SIZE(array);
    }
    Py_ssize_t B = PyNumber_AsSsize_t(arguments[4], PyExc_IndexError);
    npy_int64 limit = PyNumber_AsSsize_t(arguments[5], PyExc_IndexError);
    npy_intp size = sizes[0], count = sizes[2], n = sizes[3] - 1;
    int fits = B > 0 && size >= B && sizes[1] == size && n > 0 && !PyErr_Occurred();
    for (int i = 6; i < N_ARGUMENTS; i++) {
        fits = fits && sizes[i] == count;
    }
    if (!fits) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not fit together");
        }
        return NULL;
    }
    const npy_uint8 *flags = data[0];
    const npy_float32 *reward = data[1];
    const npy_int64 *position = data[2];
    const double *power = data[3];
    npy_int64 *at = data[6], *last = data[7], *after = data[8];
    npy_float32 *return_ = data[9], *discount = data[10];
    npy_uint8 *end = data[11];
    npy_bool *eligible = data[12];
    for (npy_intp i = 0; i < count; i++) {
        npy_int64 row = position[i] % size;
        at[i] = row + (row < 0 ? size : 0);
    }
    for (npy_intp i = 0; i < count; i++) {
        if (i + N_AHEAD < count) {
            const npy_int64 *next = &at[i + N_AHEAD];
            PREFETCH(flags + *next);
            PREFETCH(reward + *next);
        }
        npy_int64 row = at[i], length = 0, step = position[i];
        double total = 0;
        int is_whole = flags[row] & VALID, ends = 0, waits = 0;
        while (length < n && !ends) {
            total = length == 0 ? reward[row] : total + power[length] * (double)reward[row];
            length++;
            ends = flags[row] & (TERMINATED | TRUNCATED | CUT);
            last[i] = row;
            row += B;
            row -= row >= size ? size : 0;
            step += B;
            if (limit >= 0 && !(ends & (TERMINATED | TRUNCATED)) && (step >= limit || (ends && length < n))) {
                npy_int64 next = resumed_at(flags, size, step, B, limit);
                if (next >= 0) {
                    step = next;
                    row = step % size;
                    ends = 0;
                    continue;
                }
                waits = next == -2;
                ends = CUT;
            }
            /* What comes after the last step of an episode may be anything. */
            is_whole = is_whole && (ends || (flags[row] & (VALID | BEGINS)) == VALID);
        }
        after[i] = row;
        return_[i] = (npy_float32)total;
        discount[i] = ends & TERMINATED ? 0 : (npy_float32)power[length];
        end[i] = (npy_uint8)(waits ? CUT : ends & (TERMINATED | TRUNCATED));
        eligible[i] = is_whole && !waits;
    }
    Py_RETURN_NONE;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(tree_update), FUNCTION(tree_assign),  FUNCTION(tree_range), FUNCTION(tree_draw), FUNCTION(tree_ratios),
    FUNCTION(read_windows), FUNCTION(pack_flags),  FUNCTION(copy_rows),  FUNCTION(same_rows), FUNCTION(take_rows),
    FUNCTION(read_ages),    FUNCTION(take_frames), {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void) {
    import_array();
    return PyModule_Create(&definition);
}
