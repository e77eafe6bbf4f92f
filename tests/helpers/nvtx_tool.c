/* A tool that listens to NVTX, as compute-sanitizer does: it writes down what it is told of memory, a line a call.

   Built with NVTX's own headers, so that the layouts of the calls are checked too. */
#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExtMem.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE* told;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char domain_name[64];
static size_t heaps;

static const char* name_of(uint32_t kind, nvtxMessageValue_t message)
{
    return kind == NVTX_MESSAGE_TYPE_ASCII ? message.ascii : "?";
}

#define TELL(...) (pthread_mutex_lock(&turn), fprintf(told, __VA_ARGS__), fflush(told), pthread_mutex_unlock(&turn))
#define EXPECT(what) ((what) ? 0 : TELL("wrong %s\n", #what))
#define EXPECT_HEAD(one, kind) \
    (EXPECT((one)->extCompatID == NVTX_EXT_COMPATID_MEM), EXPECT((one)->structSize == sizeof(kind)), \
     EXPECT(domain == (nvtxDomainHandle_t)domain_name))

static nvtxDomainHandle_t create_domain(const char* name)
{
    strncpy(domain_name, name, sizeof domain_name - 1);
    TELL("domain %s\n", name);
    return (nvtxDomainHandle_t)domain_name;
}

static nvtxMemHeapHandle_t heap_register(nvtxDomainHandle_t domain, nvtxMemHeapDesc_t const* heap)
{
    nvtxMemVirtualRangeDesc_t const* range = heap->typeSpecificDesc;
    size_t number = __atomic_add_fetch(&heaps, 1, __ATOMIC_SEQ_CST);
    EXPECT_HEAD(heap, nvtxMemHeapDesc_t);
    EXPECT(heap->usage == NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR);
    EXPECT(heap->type == NVTX_MEM_TYPE_VIRTUAL_ADDRESS);
    EXPECT(heap->typeSpecificDescSize == sizeof *range);
    EXPECT(heap->category == 0);
    TELL("heap %zu %zu %zu %s\n", number, (size_t)range->ptr, range->size, name_of(heap->messageType, heap->message));
    return (nvtxMemHeapHandle_t)number;
}

static void heap_unregister(nvtxDomainHandle_t domain, nvtxMemHeapHandle_t heap)
{
    EXPECT(domain == (nvtxDomainHandle_t)domain_name);
    TELL("heap_ends %zu\n", (size_t)heap);
}

static void regions_register(nvtxDomainHandle_t domain, nvtxMemRegionsRegisterBatch_t const* regions)
{
    nvtxMemVirtualRangeDesc_t const* range = regions->regionDescElements;
    EXPECT_HEAD(regions, nvtxMemRegionsRegisterBatch_t);
    EXPECT(regions->regionType == NVTX_MEM_TYPE_VIRTUAL_ADDRESS);
    EXPECT(regions->regionCount == 1);
    EXPECT(regions->regionDescElementSize == sizeof *range);
    EXPECT(regions->regionHandleElementsOut == NULL);
    TELL("region %zu %zu %zu\n", (size_t)regions->heap, (size_t)range->ptr, range->size);
}

static void regions_name(nvtxDomainHandle_t domain, nvtxMemRegionsNameBatch_t const* names)
{
    nvtxMemRegionNameDesc_t const* name = names->regionElements;
    EXPECT_HEAD(names, nvtxMemRegionsNameBatch_t);
    EXPECT(names->regionCount == 1);
    EXPECT(names->regionElementSize == sizeof *name);
    EXPECT(name->regionRefType == NVTX_MEM_REGION_REF_TYPE_POINTER);
    TELL("name %zu %s\n", (size_t)name->region.pointer, name_of(name->nameType, name->name));
}

static void regions_unregister(nvtxDomainHandle_t domain, nvtxMemRegionsUnregisterBatch_t const* ends)
{
    EXPECT_HEAD(ends, nvtxMemRegionsUnregisterBatch_t);
    EXPECT(ends->refType == NVTX_MEM_REGION_REF_TYPE_POINTER);
    EXPECT(ends->refCount == 1);
    EXPECT(ends->refElementSize == sizeof *ends->refElements);
    TELL("region_ends %zu\n", (size_t)ends->refElements[0].pointer);
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table)
{
    const NvtxExportTableCallbacks* callbacks = export_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned int size;
    told = fopen(getenv("NVTX_TOOL_TOLD"), "w");
    if (!told || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size))
        return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    return 1;
}

int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t* module)
{
    intptr_t* slots;
    if (module->moduleId != NVTX_EXT_MODULEID_MEM || module->compatId != NVTX_EXT_COMPATID_MEM)
        return 0;
    slots = module->segments[0].functionSlots;
    slots[NVTX3EXT_CBID_nvtxMemHeapRegister] = (intptr_t)heap_register;
    slots[NVTX3EXT_CBID_nvtxMemHeapUnregister] = (intptr_t)heap_unregister;
    slots[NVTX3EXT_CBID_nvtxMemRegionsRegister] = (intptr_t)regions_register;
    slots[NVTX3EXT_CBID_nvtxMemRegionsName] = (intptr_t)regions_name;
    slots[NVTX3EXT_CBID_nvtxMemRegionsUnregister] = (intptr_t)regions_unregister;
    return 1;
}
