"""Profiles of pprof, read with the library for protocol buffers."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Fields of pprof's profile.proto: number, name, and a message or a kind; a star is a repeated field.
_MESSAGES = {
    "ValueType": "1 type int64, 2 unit int64",
    "Label": "1 key int64, 2 str int64, 3 num int64, 4 num_unit int64",
    "Sample": "1 location_id* uint64, 2 value* int64, 3 label* Label",
    "Line": "1 function_id uint64, 2 line int64",
    "Location": "1 id uint64, 2 mapping_id uint64, 3 address uint64, 4 line* Line",
    "Function": "1 id uint64, 2 name int64, 3 system_name int64, 4 filename int64, 5 start_line int64",
    "Profile": "1 sample_type* ValueType, 2 sample* Sample, 4 location* Location, 5 function* Function, "
    "6 string_table* string, 9 time_nanos int64, 10 duration_nanos int64, 11 period_type ValueType, 12 period int64, "
    "13 comment* int64, 14 default_sample_type int64",
}


def _profile_class():
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="pprof", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (part.split() for part in fields.split(", ")):
            label = kinds.LABEL_REPEATED if field.endswith("*") else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field.rstrip("*"), number=int(number), label=label)
            if kind in _MESSAGES:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".pprof.{kind}"
            else:
                made.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pprof.Profile"))


def parsed(content):
    """A profile; what it has beyond the fields above is an error."""
    profile = _profile_class().FromString(content)
    assert profile.SerializeToString(deterministic=True)
    assert not _unknown(profile)
    return profile


def _unknown(message):
    before = message.ByteSize()
    message.DiscardUnknownFields()
    return message.ByteSize() != before


def rows(profile):
    """Of each sample its stack, as function and line, the nearest first; its labels; and its values by name."""
    texts = profile.string_table
    functions = {one.id: one for one in profile.function}
    locations = {one.id: one for one in profile.location}
    names = [texts[kind.type] for kind in profile.sample_type]
    for sample in profile.sample:
        lines = [line for number in sample.location_id for line in locations[number].line]
        stack = [(texts[functions[line.function_id].name], line.line) for line in lines]
        labels = {texts[one.key]: texts[one.str] or one.num for one in sample.label}
        yield stack, labels, dict(zip(names, sample.value, strict=True))
