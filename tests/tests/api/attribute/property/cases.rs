//! Random functions under the attribute, as they are generated. Every combination of these parts is
//! a case, so that a failing one can be reduced part by part. `written` adjusts the parts to each
//! other.

use proptest::{
    collection::vec,
    option,
    prelude::*,
    sample::{Index, select},
};

/// A function and its attribute.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) function: String,
    pub(super) receiver: Option<&'static str>,
    pub(super) arguments: Vec<Pattern>,
    pub(super) keys: Keys,
    /// Whether the attribute has `global`. `None`: only where it is required.
    pub(super) global: Option<bool>,
    pub(super) guard: Option<String>,
    /// The value of the argument `crate`.
    pub(super) runtime: Option<&'static str>,
    /// Whether the key is the last argument of the attribute.
    pub(super) key_last: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Keys {
    One(Key),
    Several(Vec<Key>),
    /// `keys = ..`.
    Expr(Vec<Expression>),
}

#[derive(Clone, Debug)]
pub(super) enum Key {
    Template(Template),
    Expr(Expression),
    /// A literal that is no string, or a string as part of an expression.
    Literal(&'static str),
}

#[derive(Clone, Debug)]
pub(super) struct Template {
    pub(super) parts: Vec<Part>,
    /// `key("..", values)`; `key = ".."` has none.
    pub(super) values: Option<Vec<Value>>,
    pub(super) style: Style,
    /// Whether placeholders and values match.
    pub(super) fits: bool,
}

/// The form of a string literal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Style {
    Plain,
    Escaped,
    Raw,
    /// With a line that is continued in the next one, at this position.
    Continued(Index),
}

#[derive(Clone, Debug)]
pub(super) enum Part {
    /// Text whose braces are doubled.
    Text(String),
    Hole(Hole),
    /// Text that is written as it is, valid or not.
    Raw(String),
    /// The name of an argument without braces, between `Raw` parts.
    Name(Index),
    /// Text that brings the key to this length in bytes, values not counted.
    UpTo(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Hole {
    pub(super) target: Target,
    pub(super) spec: Spec,
    /// The white space before the name, after it and after the spec.
    pub(super) space: [&'static str; 3],
}

#[derive(Clone, Debug)]
pub(super) enum Target {
    /// `{}`, or a value or argument of this index where `{}` has no value.
    Next(Index),
    Number(Index),
    Named(Index),
    Argument(Index),
    Word(String),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Spec {
    Any(&'static str),
    Number(&'static str),
    Debug(&'static str),
    /// A spec that takes a number from an argument.
    Counted(&'static str),
    /// A rare or invalid spec, for any value.
    Odd(&'static str),
}

/// A value after the string.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) name: Option<String>,
    pub(super) form: Form,
    pub(super) of: Index,
}

#[derive(Clone, Debug)]
pub(super) enum Form {
    Plain,
    Borrowed,
    InParentheses,
    Call,
    Method,
    Await,
    Try,
    Block,
    Compare,
    /// A fixed expression.
    Text(&'static str),
    Of(Val),
}

/// A key that is no format string.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    pub(super) form: &'static str,
    pub(super) of: Index,
    pub(super) text: String,
}

#[derive(Clone, Debug)]
pub(super) enum Pattern {
    Leaf(Leaf),
    Wild(Val),
    Tuple {
        items: Vec<Pattern>,
        rest: bool,
    },
    /// `Path(..)`.
    Wrapper(Box<Pattern>),
    /// A struct; with `true`, a field has the name that it binds, where possible.
    Fields {
        items: Vec<(bool, Pattern)>,
        rest: bool,
    },
    /// `&..`.
    Reference(Box<Pattern>),
    /// A pattern without `&` for a reference.
    Borrowed(Box<Pattern>),
    /// Numbers or `_`, and optionally `..` with or without a name.
    Array {
        items: Vec<Option<Leaf>>,
        rest: Option<Option<String>>,
    },
    /// `(Ok(x) | Err(x))`.
    Either(Leaf),
    /// `x @ (_, _)`.
    Whole(String),
}

#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) how: How,
    pub(super) name: String,
    pub(super) value: Val,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Plain,
    Mut,
    Ref,
    RefMut,
    /// `x @ _`.
    At,
    /// By a macro in place of a pattern.
    Macro,
}

#[derive(Clone, Debug)]
pub(super) enum Val {
    Number(u64),
    Negative(i64),
    Float(f64),
    Char(char),
    Str(String),
    Owned(String),
}

pub(super) fn case() -> BoxedStrategy<Case> {
    let receiver = prop_oneof![
        5 => Just(None),
        1 => select(&["self", "mut self", "&self", "&mut self", "self: Box<Self>", "self: &Self", "self: std::sync::Arc<Self>"][..])
            .prop_map(Some),
    ];
    (
        name(),
        receiver,
        vec(pattern(), 0..4),
        keys(),
        option::weighted(0.1, any::<bool>()),
        option::weighted(0.15, name()),
        option::weighted(
            0.1,
            select(
                &[
                    "::lock_runtime",
                    "lock_runtime",
                    "crate::support::elsewhere",
                ][..],
            ),
        ),
        any::<bool>(),
    )
        .prop_map(
            |(function, receiver, arguments, keys, global, guard, runtime, key_last)| Case {
                function,
                receiver,
                arguments,
                keys,
                global,
                guard,
                runtime,
                key_last,
            },
        )
        .boxed()
}

/// Names that the expansion uses.
const INTERNAL: [&str; 12] = [
    "__k",
    "__a0",
    "__a1",
    "__client",
    "__request",
    "__entered",
    "__held",
    "__outcome",
    "__error",
    "__returned",
    "__value",
    "__given",
];
/// Names that the attribute uses, or that a path may begin with.
const TAKEN: [&str; 22] = [
    "args",
    "body",
    "client",
    "core",
    "format_args",
    "global",
    "guard",
    "held",
    "k",
    "key",
    "keys",
    "lock",
    "locks",
    "lock_runtime",
    "outcome",
    "permits",
    "read",
    "request",
    "skip",
    "spec",
    "std",
    "write",
];
/// Names with more than one spelling, and names that look like something else.
const ODD: [&str; 24] = [
    "_x", "__", "_1", "r#type", "r#match", "r#async", "r#fn", "r#gen", "r#try", "r#id", "r#union",
    "auto", "raw", "größe", "é", "e\u{301}", "ñandú", "имя", "名前", "ß", "Größe", "X", "String",
    "Result",
];
/// Words that cannot be names.
const KEYWORDS: [&str; 52] = [
    "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate",
    "do", "dyn", "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl",
    "in", "let", "loop", "macro", "match", "mod", "move", "mut", "override", "priv", "pub", "ref",
    "return", "self", "static", "struct", "super", "trait", "true", "try", "type", "typeof",
    "unsafe", "unsized", "use", "virtual", "where", "while", "yield", "_",
];

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => select(&["id", "a", "b", "order_id"][..]).prop_map(String::from),
        // Names of the expansion that are in scope at the key.
        2 => select(&["__k", "__a0"][..]).prop_map(String::from),
        2 => select(&INTERNAL[..]).prop_map(String::from),
        2 => select(&TAKEN[..]).prop_map(String::from),
        3 => select(&ODD[..]).prop_map(String::from),
        1 => "[a-z_][a-z0-9_]{0,5}".prop_filter("a keyword", |name| !KEYWORDS.contains(&name.as_str())),
    ]
}

fn pattern() -> impl Strategy<Value = Pattern> {
    let leaf = prop_oneof![
        8 => leaf().prop_map(Pattern::Leaf),
        1 => val().prop_map(Pattern::Wild),
        1 => leaf().prop_map(Pattern::Either),
        1 => name().prop_map(Pattern::Whole),
        1 => (vec(option::weighted(0.8, leaf()), 0..3), option::weighted(0.5, option::weighted(0.5, name())))
            .prop_map(|(items, rest)| Pattern::Array { items, rest }),
    ];
    let inner = leaf.prop_recursive(3, 6, 2, |inner| {
        prop_oneof![
            (vec(inner.clone(), 0..3), any::<bool>())
                .prop_map(|(items, rest)| Pattern::Tuple { items, rest }),
            (vec((any::<bool>(), inner.clone()), 0..3), any::<bool>())
                .prop_map(|(items, rest)| Pattern::Fields { items, rest }),
            inner
                .clone()
                .prop_map(|inner| Pattern::Wrapper(inner.into())),
            inner
                .clone()
                .prop_map(|inner| Pattern::Reference(inner.into())),
            inner.prop_map(|inner| Pattern::Borrowed(inner.into())),
        ]
    });
    prop_oneof![2 => self::leaf().prop_map(Pattern::Leaf), 3 => inner]
}

fn leaf() -> impl Strategy<Value = Leaf> {
    let how = prop_oneof![
        8 => Just(How::Plain),
        2 => Just(How::Mut),
        1 => Just(How::Ref),
        1 => Just(How::RefMut),
        1 => Just(How::At),
        1 => Just(How::Macro),
    ];
    (how, name(), val()).prop_map(|(how, name, value)| Leaf { how, name, value })
}

fn val() -> impl Strategy<Value = Val> {
    prop_oneof![
        4 => prop_oneof![0..20_u64, any::<u64>()].prop_map(Val::Number),
        1 => any::<i64>().prop_map(Val::Negative),
        1 => select(&[0.0, -0.5, 1.25, 1e300][..]).prop_map(Val::Float),
        1 => any::<char>().prop_map(|char| Val::Char(unmarked(char))),
        3 => any_text().prop_map(Val::Str),
        3 => any_text().prop_map(Val::Owned),
    ]
}

fn keys() -> impl Strategy<Value = Keys> {
    prop_oneof![
        6 => key().prop_map(Keys::One),
        3 => prop_oneof![12 => vec(key(), 1..4), 1 => Just(Vec::new())].prop_map(Keys::Several),
        1 => vec(expression(), 0..3).prop_map(Keys::Expr),
    ]
}

fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        32 => template().prop_map(Key::Template),
        4 => expression().prop_map(Key::Expr),
        2 => select(&LITERALS[..]).prop_map(Key::Literal),
    ]
}

const LITERALS: [&str; 11] = [
    "42",
    "'a'",
    "b\"a\"",
    "c\"a\"",
    "true",
    "1.5",
    "(\"order:{id}\")",
    "&\"order:{id}\"",
    "\"order:{id}\".to_owned()",
    "String::from(\"order\")",
    "concat!(\"order:\", \"{id}\")",
];

fn template() -> impl Strategy<Value = Template> {
    let parts = prop_oneof![
        12 => vec(part(), 0..5),
        2 => broken(),
        2 => vec(soup(), 0..10),
    ];
    let style = prop_oneof![
        4 => Just(Style::Plain),
        1 => Just(Style::Escaped),
        1 => Just(Style::Raw),
        1 => any::<Index>().prop_map(Style::Continued),
    ];
    (
        parts,
        option::of(vec(value(), 0..4)),
        style,
        prop::bool::weighted(0.85),
    )
        .prop_map(|(parts, values, style, fits)| Template {
            parts,
            values,
            style,
            fits,
        })
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        30 => text().prop_map(Part::Text),
        40 => hole().prop_map(Part::Hole),
        1 => (510..514_usize).prop_map(Part::UpTo),
    ]
}

/// A string with one invalid brace or placeholder.
fn broken() -> impl Strategy<Value = Vec<Part>> {
    let parts = vec(
        prop_oneof![text().prop_map(Part::Text), hole().prop_map(Part::Hole)],
        0..3,
    );
    let wrong = select(
        &[
            "{", "}", "{{}", "{}}", "{id", "{ ", "{id:", "{:", "{:>", "{id:>5", "}{", "{{{", "}}}",
        ][..],
    );
    (parts, wrong, any::<Index>()).prop_map(|(mut parts, wrong, at)| {
        parts.insert(at.index(parts.len() + 1), Part::Raw(wrong.into()));
        parts
    })
}

/// A token of a string that may be a format string or not. No token takes a width from an
/// argument.
fn soup() -> impl Strategy<Value = Part> {
    const TOKENS: [&str; 39] = [
        "{", "}", "{", "}", "{{", "}}", "{{", "}}", "{}", ":", ":", "?", "<", "^", ">", "+", "-",
        "#", "0", "1", "5", ".", ".3", "x", "X", "e", "b", "o", " ", "\t", "\n", "\u{a0}",
        "\u{200e}", "!", "'", "\"", "é", "→", "_",
    ];
    prop_oneof![
        5 => select(&TOKENS[..]).prop_map(|token| Part::Raw(token.into())),
        1 => any::<Index>().prop_map(Part::Name),
        1 => text().prop_map(Part::Text),
    ]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        12 => select(&["order:", "a", ":", "/", "", "{orders}", "{"][..]).prop_map(String::from),
        1 => select(&["permits:", "permits", "{orders}", "{", "}", "{}", "%", "#", "a:b/c", "%3A", "\\", "\"", "\"#"][..])
            .prop_map(String::from),
        2 => "\\PC{0,8}",
        1 => "[a-z:/%{}#$*. ]{0,6}",
        1 => select(&["\n", "\r\n", "\0", "\t", "\u{7f}", "\u{85}", "\u{200e}", "\u{202e}", "e\u{301}", "🦀"][..])
            .prop_map(String::from),
    ]
    .prop_map(|text| text.chars().map(unmarked).collect())
}

/// The text of a value, which may be too long for any key.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![15 => text(), 1 => (500..520_usize).prop_map(|length| "x".repeat(length))]
}

/// Replaces the marks of the reference, which must not occur in a text or a value.
fn unmarked(char: char) -> char {
    if matches!(char, '\u{E000}' | '\u{E001}') {
        'm'
    } else {
        char
    }
}

fn hole() -> impl Strategy<Value = Hole> {
    const ODD: [&str; 21] = [
        "a.b",
        "a()",
        "&a",
        "*a",
        "1a",
        "-1",
        "01",
        "0x1",
        "18446744073709551616",
        "a b",
        "a\u{301}",
        "r#type",
        "r#id",
        "self.0",
        "::a",
        "a::b",
        "'a",
        "🦀",
        "a!",
        "#",
        "\"",
    ];
    let word = prop_oneof![
        4 => Just("LIMIT".to_owned()),
        4 => name().prop_map(|name| name.trim_start_matches("r#").to_owned()),
        2 => Just("self".to_owned()),
        2 => select(&["missing", "Missing", "MISSING", "LIMITS", "_missing", "отсутствует", "不在"][..]).prop_map(String::from),
        1 => select(&KEYWORDS[..]).prop_map(String::from),
        2 => select(&ODD[..]).prop_map(String::from),
    ];
    let target = prop_oneof![
        3 => any::<Index>().prop_map(Target::Next),
        2 => any::<Index>().prop_map(Target::Number),
        2 => any::<Index>().prop_map(Target::Named),
        6 => any::<Index>().prop_map(Target::Argument),
        1 => word.prop_map(Target::Word),
    ];
    let space = || prop_oneof![40 => Just(""), 1 => select(&[" ", "\t", "\n", "\u{a0}", "\u{200e}", "\u{3000}"][..])];
    (target, spec(), [space(), space(), space()]).prop_map(|(target, spec, space)| Hole {
        target,
        spec,
        space,
    })
}

fn spec() -> impl Strategy<Value = Spec> {
    const ANY: [&str; 20] = [
        ":>8", ":<12", ":^5", ":*^9", ":.3", ":>8.3", ":04", ":0>3", ":→^7", ": >5", ":5", ":.0",
        ":>", ":-", ":}>4", ":{<4", ":\">4", "::>4", ":$>4", ":.^4",
    ];
    const NUMBER: [&str; 11] = [
        ":x", ":#x", ":X", ":b", ":#010b", ":o", ":+", ":+05", ":#06x", ":08.3", ":e",
    ];
    const DEBUG: [&str; 9] = [
        ":?", ":#?", ":>8?", ":.3?", ":x?", ":#X?", ":02x?", ": <9?", ":0?",
    ];
    const COUNTED: [&str; 6] = [":1$", ":id$", ":.*", ":.id$", ":>1$.3", ":$>1$"];
    const ODD: [&str; 21] = [
        ":",
        ":zz",
        ":.",
        ":::",
        ":?x",
        ":08.",
        "!r",
        "!",
        "=",
        ":>>",
        ":??",
        ":#",
        ":0",
        ":00",
        ":+-",
        ":99999",
        ":.99999",
        ":4294967296",
        ":P",
        ": ",
        ":é",
    ];
    prop_oneof![
        12 => Just(Spec::Any("")),
        4 => select(&ANY[..]).prop_map(Spec::Any),
        2 => select(&NUMBER[..]).prop_map(Spec::Number),
        2 => select(&DEBUG[..]).prop_map(Spec::Debug),
        1 => prop_oneof![1 => select(&COUNTED[..]).prop_map(Spec::Counted), 3 => select(&ODD[..]).prop_map(Spec::Odd)],
    ]
}

fn value() -> impl Strategy<Value = Value> {
    const TEXTS: [&str; 16] = [
        "COUNT",
        "self.0",
        "self",
        "if true { \"a\" } else { \"b\" }",
        "match 1 { 1 => \"one\", _ => \"other\" }",
        "Vec::<(u64, u64)>::new().len()",
        "<u64 as From<u8>>::from(1)",
        "(|x: u64, y: u64| x + y)(1, 2)",
        "[1, 2][1]",
        "1 + 2 * 3",
        "-1",
        "\"a:b\".len() as u64",
        "format!(\"{}:{{}}\", 1).trim()",
        "{ let __k = 1; let __client = __k; __client }",
        "unsafe { 3 }",
        "const { 4 }",
    ];
    let form = prop_oneof![
        6 => Just(Form::Plain),
        2 => Just(Form::Borrowed),
        1 => Just(Form::InParentheses),
        1 => Just(Form::Call),
        1 => Just(Form::Method),
        1 => Just(Form::Await),
        1 => Just(Form::Try),
        1 => Just(Form::Block),
        1 => Just(Form::Compare),
        2 => select(&TEXTS[..]).prop_map(Form::Text),
        2 => val().prop_map(Form::Of),
    ];
    let name = prop_oneof![8 => name(), 1 => select(&KEYWORDS[..]).prop_map(String::from)];
    (option::weighted(0.3, name), form, any::<Index>()).prop_map(|(name, form, of)| Value {
        name,
        form,
        of,
    })
}

fn expression() -> impl Strategy<Value = Expression> {
    // `@` stands for an argument, `%` for a text.
    const FORMS: [&str; 9] = [
        "String::from(%).repeat(1)",
        "&[%].concat()",
        "(std::convert::identity(%))",
        "format!(\"e:{:?}\", @)",
        "&format!(\"{:?}\", @)[..]",
        "if true { % } else { \"other\" }",
        "{ let key = %; key }",
        "crate::support::ready(%).await",
        "crate::support::fine(%)?",
    ];
    (select(&FORMS[..]), any::<Index>(), any_text()).prop_map(|(form, of, text)| Expression {
        form,
        of,
        text,
    })
}
