//! The parts of a case, adjusted to each other: a name that is already bound is replaced by another
//! one, and a value without a placeholder gets one. Deliberate errors stay.

use std::collections::HashSet;

use proptest::sample::Index;

use super::cases::{
    Case, Expression, Form, Hole, How, Key, Keys, Leaf, Part, Pattern, Spec, Style, Target,
    Template, Val, Value,
};

/// The parts of the source of a case.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) function: String,
    pub(super) receiver: Option<&'static str>,
    pub(super) structs: String,
    pub(super) parameters: Vec<String>,
    /// The arguments of the call.
    pub(super) given: Vec<String>,
    pub(super) bindings: Vec<Binding>,
    pub(super) form: KeysForm,
    pub(super) keys: Vec<WrittenKey>,
    pub(super) global: bool,
    pub(super) guard: Option<String>,
    pub(super) runtime: Option<&'static str>,
    pub(super) key_last: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Binding {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// It is bound by a macro, so the attribute cannot find it.
    pub(super) hidden: bool,
}

/// The format specs that a value supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Number,
    Text,
    Debug,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeysForm {
    /// `key = ..` or `key(..)`.
    One,
    /// `keys(..)`.
    Several,
    /// `keys = ..`.
    Expr,
}

#[derive(Debug)]
pub(super) enum WrittenKey {
    Template(WrittenTemplate),
    Expr(String),
    Literal(&'static str),
}

#[derive(Debug)]
pub(super) struct WrittenTemplate {
    /// The string that the literal denotes.
    pub(super) text: String,
    pub(super) literal: String,
    pub(super) values: Option<Vec<WrittenValue>>,
    /// Whether a placeholder takes its width or precision from an argument.
    pub(super) counted: bool,
    /// Whether a named value is used by its position.
    pub(super) named_by_place: bool,
}

#[derive(Debug)]
pub(super) struct WrittenValue {
    pub(super) name: Option<String>,
    pub(super) expr: String,
    pub(super) kind: Kind,
}

impl Written {
    /// Returns whether a pattern contains an argument that the attribute cannot find.
    pub(super) fn hides_arguments(&self) -> bool {
        self.bindings.iter().any(|binding| binding.hidden)
    }

    pub(super) fn guard_hides_an_argument(&self) -> bool {
        let is_it = |guard: &String| {
            self.bindings
                .iter()
                .any(|binding| plain(&binding.name) == plain(guard))
        };
        self.guard.as_ref().is_some_and(is_it)
    }
}

impl Case {
    pub(super) fn written(&self) -> Written {
        let mut scope = Scope {
            method: self.receiver.is_some(),
            ..Scope::default()
        };
        let mut parameters = Vec::new();
        let mut given = Vec::new();
        for pattern in &self.arguments {
            let Parameter { pattern, ty, value } = scope.pattern(pattern, Mode::Owned);
            parameters.push(format!("{pattern}: {ty}"));
            given.push(value);
        }
        let (form, keys) = match &self.keys {
            Keys::One(key) => (KeysForm::One, vec![scope.key(key)]),
            Keys::Several(keys) => (
                KeysForm::Several,
                keys.iter().map(|key| scope.key(key)).collect(),
            ),
            Keys::Expr(keys) => (
                KeysForm::Expr,
                keys.iter()
                    .map(|key| WrittenKey::Expr(scope.expression(key)))
                    .collect(),
            ),
        };
        Written {
            function: self.function.clone(),
            receiver: self.receiver,
            global: self.global.unwrap_or(scope.constant),
            structs: scope.structs,
            parameters,
            given,
            form,
            keys,
            // A guard with the name of a hidden argument is left out: the attribute cannot refuse
            // it.
            guard: self.guard.clone().filter(|guard| {
                !scope
                    .bindings
                    .iter()
                    .any(|binding| binding.hidden && plain(&binding.name) == plain(guard))
            }),
            runtime: self.runtime,
            key_last: self.key_last,
            bindings: scope.bindings,
        }
    }
}

/// The name without `r#`, as in a format string.
fn word(name: &str) -> &str {
    name.trim_start_matches("r#")
}

/// The name without `r#` and in NFC, as Rust compares names. One name of the cases occurs in two
/// forms.
fn plain(name: &str) -> String {
    word(name).replace("e\u{301}", "é")
}

/// The names and structs of the arguments so far.
#[derive(Default)]
struct Scope {
    method: bool,
    names: HashSet<String>,
    bindings: Vec<Binding>,
    structs: String,
    /// Whether there is a key without placeholders.
    constant: bool,
}

/// The binding mode of a pattern.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Owned,
    /// Below `&`: no value can be moved out.
    Shared,
    /// No `&` in the pattern of a reference: names are bound without `mut` and `ref`.
    Default,
}

struct Parameter {
    pattern: String,
    ty: String,
    value: String,
}

impl Scope {
    /// Binds the name, or another one if it is taken.
    fn bind(&mut self, name: &str, kind: Kind) -> String {
        let free = |name: &String| !self.names.contains(&plain(name));
        let others = (0..).map(|number| format!("other_{number}"));
        let name = std::iter::once(name.to_owned())
            .chain(others)
            .find(free)
            .unwrap_or_default();
        self.names.insert(plain(&name));
        self.bindings.push(Binding {
            name: name.clone(),
            kind,
            hidden: false,
        });
        name
    }

    fn pattern(&mut self, pattern: &Pattern, mode: Mode) -> Parameter {
        match pattern {
            Pattern::Leaf(leaf) => {
                let (_, written) = self.leaf(leaf, mode, true);
                written
            }
            Pattern::Wild(value) => {
                let (value, ty, _) = literal(value, mode);
                Parameter {
                    pattern: "_".into(),
                    ty,
                    value,
                }
            }
            Pattern::Tuple { items, rest } => {
                let mut items: Vec<_> = items.iter().map(|item| self.pattern(item, mode)).collect();
                if *rest {
                    items.push(Parameter {
                        pattern: "..".into(),
                        ty: "u64".into(),
                        value: "0".into(),
                    });
                }
                let all = |part: fn(&Parameter) -> &str| {
                    items
                        .iter()
                        .map(|item| format!("{}, ", part(item)))
                        .collect::<String>()
                };
                Parameter {
                    pattern: format!("({})", all(|item| &item.pattern)),
                    ty: format!("({})", all(|item| &item.ty)),
                    value: format!("({})", all(|item| &item.value)),
                }
            }
            Pattern::Wrapper(inner) => {
                let Parameter { pattern, ty, value } = self.pattern(inner, mode);
                Parameter {
                    pattern: format!("Path({pattern})"),
                    ty: format!("Path<{ty}>"),
                    value: format!("Path({value})"),
                }
            }
            Pattern::Fields { items, rest } => self.fields(items, *rest, mode),
            Pattern::Reference(inner) => {
                let inside = if mode == Mode::Default {
                    mode
                } else {
                    Mode::Shared
                };
                let Parameter { pattern, ty, value } = self.pattern(inner, inside);
                let pattern = match mode {
                    Mode::Default => pattern,
                    // Without parentheses, `&mut x` would match a mutable reference.
                    _ if pattern.starts_with("mut ") || pattern.contains('@') => {
                        format!("&({pattern})")
                    }
                    _ => format!("&{pattern}"),
                };
                Parameter {
                    pattern,
                    ty: format!("&{ty}"),
                    value: format!("&{value}"),
                }
            }
            Pattern::Borrowed(inner) => {
                let Parameter { pattern, ty, value } = self.pattern(inner, Mode::Default);
                Parameter {
                    pattern,
                    ty: format!("&{ty}"),
                    value: format!("&{value}"),
                }
            }
            Pattern::Array { items, rest } => self.array(items, rest.as_ref(), mode),
            Pattern::Either(leaf) => {
                let leaf = Leaf {
                    how: if leaf.how == How::Macro {
                        How::Plain
                    } else {
                        leaf.how
                    },
                    ..leaf.clone()
                };
                let (_, Parameter { pattern, ty, value }) = self.leaf(&leaf, mode, false);
                Parameter {
                    pattern: format!("(Ok({pattern}) | Err({pattern}))"),
                    value: format!("Ok::<{ty}, {ty}>({value})"),
                    ty: format!("Result<{ty}, {ty}>"),
                }
            }
            Pattern::Whole(name) => {
                let name = self.bind(name, Kind::Debug);
                Parameter {
                    pattern: format!("{name} @ (_, _)"),
                    ty: "(u64, char)".into(),
                    value: "(7, 'c')".into(),
                }
            }
        }
    }

    /// Binds the name of a leaf, and returns it with its parameter.
    fn leaf(&mut self, leaf: &Leaf, mode: Mode, alone: bool) -> (String, Parameter) {
        let (value, ty, kind) = literal(&leaf.value, mode);
        let name = self.bind(&leaf.name, kind);
        let pattern = match (leaf.how, mode) {
            (How::Macro, _) if alone => {
                self.bindings
                    .iter_mut()
                    .last()
                    .into_iter()
                    .for_each(|binding| binding.hidden = true);
                format!("crate::support::hidden!({name})")
            }
            (How::At, _) => format!("{name} @ _"),
            (How::Mut, Mode::Owned | Mode::Shared) => format!("mut {name}"),
            (How::RefMut, Mode::Owned) => format!("ref mut {name}"),
            (How::Ref | How::RefMut, Mode::Owned | Mode::Shared) => format!("ref {name}"),
            _ => name.clone(),
        };
        (name, Parameter { pattern, ty, value })
    }

    fn fields(&mut self, items: &[(bool, Pattern)], rest: bool, mode: Mode) -> Parameter {
        let (mut patterns, mut types, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let mut declared = Vec::new();
        for (place, (short, item)) in items.iter().enumerate() {
            let generic = format!("T{place}");
            let (field, written) = match item {
                Pattern::Leaf(leaf) if *short && !matches!(leaf.how, How::Macro | How::At) => {
                    let (name, written) = self.leaf(leaf, mode, false);
                    patterns.push(written.pattern.clone());
                    (name, written)
                }
                item => {
                    let field = format!("renamed_field_{place}");
                    let written = self.pattern(item, mode);
                    patterns.push(format!("{field}: {}", written.pattern));
                    (field, written)
                }
            };
            declared.push((generic, field.clone()));
            types.push(written.ty);
            values.push(format!("{field}: {}", written.value));
        }
        if rest {
            declared.push(("TRest".into(), "rest_of_them".into()));
            patterns.push("..".into());
            types.push("u64".into());
            values.push("rest_of_them: 0".into());
        }
        // The structs nested in this one are already declared.
        let number = self.structs.matches("struct").count();
        let generics: Vec<_> = declared
            .iter()
            .map(|(generic, _)| generic.as_str())
            .collect();
        let fields: Vec<_> = declared
            .iter()
            .map(|(generic, field)| format!("{field}: {generic}"))
            .collect();
        self.structs += &format!(
            "pub struct Fields{number}<{}> {{ {} }}\n",
            generics.join(", "),
            fields.join(", ")
        );
        Parameter {
            pattern: format!("Fields{number} {{ {} }}", patterns.join(", ")),
            ty: format!("Fields{number}<{}>", types.join(", ")),
            value: format!("Fields{number} {{ {} }}", values.join(", ")),
        }
    }

    fn array(
        &mut self,
        items: &[Option<Leaf>],
        rest: Option<&Option<String>>,
        mode: Mode,
    ) -> Parameter {
        let mut patterns: Vec<String> = Vec::new();
        for item in items {
            patterns.push(match item {
                None => "_".into(),
                Some(leaf) => {
                    self.leaf(
                        &Leaf {
                            value: Val::Number(3),
                            ..leaf.clone()
                        },
                        mode,
                        true,
                    )
                    .1
                    .pattern
                }
            });
        }
        let mut length = items.len();
        if let Some(name) = rest {
            length += 2;
            patterns.push(match name {
                None => "..".into(),
                Some(name) => format!("{} @ ..", self.bind(name, Kind::Debug)),
            });
        }
        Parameter {
            pattern: format!("[{}]", patterns.join(", ")),
            ty: format!("[u64; {length}]"),
            value: format!("[3; {length}]"),
        }
    }

    fn binding(&self, of: &Index) -> Option<&Binding> {
        (!self.bindings.is_empty()).then(|| of.get(&self.bindings))
    }

    fn key(&mut self, key: &Key) -> WrittenKey {
        match key {
            Key::Template(template) => WrittenKey::Template(self.template(template)),
            Key::Expr(expression) => WrittenKey::Expr(self.expression(expression)),
            Key::Literal(literal) => WrittenKey::Literal(literal),
        }
    }

    fn expression(&self, expression: &Expression) -> String {
        let argument = self
            .binding(&expression.of)
            .map_or("COUNT", |binding| &binding.name);
        // The text comes last, because it may contain `@`.
        expression
            .form
            .replace('@', argument)
            .replace('%', &format!("{:?}", expression.text))
    }

    fn template(&mut self, template: &Template) -> WrittenTemplate {
        let whole = !template
            .parts
            .iter()
            .any(|part| matches!(part, Part::Raw(_) | Part::Name(_)));
        let fits = template.fits && whole;
        let values = template
            .values
            .as_ref()
            .map(|values| self.values(values, fits, whole));
        let mut given = Given::new(values.as_deref().unwrap_or_default(), fits);
        let mut text = String::new();
        let mut bytes = 0;
        for part in &template.parts {
            match part {
                Part::UpTo(length) => text += &"x".repeat(length.saturating_sub(bytes)),
                Part::Text(plain) => text += &plain.replace('{', "{{").replace('}', "}}"),
                Part::Raw(raw) => text += raw,
                Part::Name(of) => {
                    text += self.binding(of).map_or("a", |binding| word(&binding.name))
                }
                Part::Hole(hole) => text += &self.hole(hole, &mut given),
            }
            bytes = match part {
                Part::Text(plain) => bytes + plain.len(),
                Part::UpTo(length) => bytes.max(*length),
                _ => bytes,
            };
        }
        if fits {
            text += &given.left_over();
            if text.is_empty() {
                text += "k";
            }
        }
        let Given {
            holes,
            counted,
            named_by_place,
            ..
        } = given;
        self.constant |= holes == 0 && !text.is_empty();
        WrittenTemplate {
            literal: template.style.literal(&text),
            text,
            values,
            counted,
            named_by_place,
        }
    }

    fn hole(
        &self,
        Hole {
            target,
            spec,
            space,
        }: &Hole,
        given: &mut Given<'_>,
    ) -> String {
        let Given {
            values,
            positional,
            fits,
            ..
        } = *given;
        let named = values[positional..].len();
        // Without a value, the placeholder names an argument, and without an argument, a
        // constant.
        let (name, kind) = match target {
            Target::Next(_) if !fits || given.next < positional => {
                given.next += 1;
                (String::new(), given.by_place(given.next - 1))
            }
            Target::Next(of) | Target::Number(of) if !fits || positional > 0 => {
                let number = of.index(if fits { positional } else { values.len() + 2 });
                (number.to_string(), given.by_place(number))
            }
            Target::Named(of) if named > 0 => {
                let number = positional + of.index(named);
                given.used[number] = true;
                (values[number].called().to_owned(), values[number].kind)
            }
            Target::Next(of) | Target::Number(of) | Target::Named(of) | Target::Argument(of) => {
                match self.binding(of) {
                    Some(binding) => (word(&binding.name).to_owned(), binding.kind),
                    None => ("LIMIT".into(), Kind::Number),
                }
            }
            Target::Word(name) => {
                let bound = self
                    .bindings
                    .iter()
                    .find(|binding| plain(&binding.name) == plain(name));
                (
                    name.clone(),
                    bound.map_or(Kind::Text, |binding| binding.kind),
                )
            }
        };
        given.holes += 1;
        given.counted |= !fits && matches!(spec, Spec::Counted(_));
        format!(
            "{{{}{name}{}{}{}}}",
            space[0],
            space[1],
            spec.fitted(kind, fits),
            space[2]
        )
    }

    /// The values after a string. With `fits`, names are unique and named values come last.
    fn values(&self, values: &[Value], fits: bool, names: bool) -> Vec<WrittenValue> {
        let mut taken = HashSet::new();
        let value = |Value { name, form, of }: &Value| {
            let (expr, kind) = self.value(form, self.binding(of));
            let name = name
                .clone()
                .filter(|name| names && (taken.insert(plain(name)) || !fits));
            WrittenValue { name, expr, kind }
        };
        let mut written: Vec<_> = values.iter().map(value).collect();
        if fits {
            written.sort_by_key(|value| value.name.is_some());
        }
        written
    }

    fn value(&self, form: &Form, of: Option<&Binding>) -> (String, Kind) {
        let (name, kind) = of.map_or(("COUNT", Kind::Number), |binding| {
            (&binding.name, binding.kind)
        });
        match form {
            Form::Plain => (name.into(), kind),
            Form::Borrowed => (format!("&{name}"), kind),
            Form::InParentheses => (format!("({name})"), kind),
            Form::Call => (format!("crate::support::same(&{name})"), kind),
            Form::Method => (format!("format!(\"{{:?}}\", {name}).trim()"), Kind::Text),
            Form::Await => (format!("crate::support::ready(&{name}).await"), kind),
            Form::Try => (format!("crate::support::fine(&{name})?"), kind),
            Form::Block => (format!("{{ let inner = &{name}; inner }}"), kind),
            Form::Compare => (format!("{name} == {name}"), Kind::Text),
            Form::Text(text) if text.starts_with("self") && !self.method => {
                ("COUNT".into(), Kind::Number)
            }
            Form::Text(text) => ((*text).into(), Kind::Text),
            Form::Of(value) => {
                let (value, _, kind) = literal(value, Mode::Owned);
                (value, kind)
            }
        }
    }
}

/// The values of a string, and their use by its placeholders so far.
struct Given<'a> {
    values: &'a [WrittenValue],
    positional: usize,
    fits: bool,
    used: Vec<bool>,
    /// The number of `{}` so far.
    next: usize,
    holes: usize,
    counted: bool,
    named_by_place: bool,
}

impl<'a> Given<'a> {
    fn new(values: &'a [WrittenValue], fits: bool) -> Self {
        Self {
            values,
            positional: values.iter().filter(|value| value.name.is_none()).count(),
            fits,
            used: vec![false; values.len()],
            next: 0,
            holes: 0,
            counted: false,
            named_by_place: false,
        }
    }

    /// Marks the value at this position as used, if there is one, and returns its kind.
    fn by_place(&mut self, number: usize) -> Kind {
        let Some(value) = self.values.get(number) else {
            return Kind::Text;
        };
        self.used[number] = true;
        self.named_by_place |= value.name.is_some();
        value.kind
    }

    /// Placeholders for the values that are not used yet.
    fn left_over(&mut self) -> String {
        let unused = (0..self.values.len()).filter(|number| !self.used[*number]);
        let written = unused.map(|number| {
            let value = &self.values[number];
            let name = if value.name.is_some() {
                value.called().to_owned()
            } else {
                number.to_string()
            };
            format!("/{{{name}{}}}", Spec::Any("").fitted(value.kind, true))
        });
        let written: String = written.collect();
        self.holes += usize::from(!written.is_empty());
        written
    }
}

impl WrittenValue {
    /// The name of the value in a placeholder.
    fn called(&self) -> &str {
        self.name.as_deref().map_or("", word)
    }
}

/// The value as an expression, its type, and its kind.
fn literal(value: &Val, mode: Mode) -> (String, String, Kind) {
    match value {
        Val::Number(number) => (format!("{number}_u64"), "u64".into(), Kind::Number),
        Val::Negative(number) => (format!("({number}_i64)"), "i64".into(), Kind::Number),
        Val::Float(number) => (format!("({number:?}_f64)"), "f64".into(), Kind::Text),
        Val::Char(char) => (format!("{char:?}"), "char".into(), Kind::Text),
        Val::Owned(text) if mode != Mode::Shared => (
            format!("String::from({text:?})"),
            "String".into(),
            Kind::Text,
        ),
        Val::Str(text) | Val::Owned(text) => {
            (format!("{text:?}"), "&'static str".into(), Kind::Text)
        }
    }
}

impl Spec {
    fn fitted(self, kind: Kind, fits: bool) -> &'static str {
        match (self, kind) {
            (Self::Any(_) | Self::Number(_), Kind::Debug) if fits => ":?",
            (Self::Number(_), Kind::Text) if fits => "",
            (Self::Counted(_) | Self::Odd(_), _) if fits => "",
            (Self::Any(spec) | Self::Number(spec) | Self::Debug(spec), _) => spec,
            (Self::Counted(spec) | Self::Odd(spec), _) => spec,
        }
    }
}

impl Style {
    fn literal(self, text: &str) -> String {
        match self {
            Self::Plain => format!("{text:?}"),
            Self::Escaped => format!("\"{}\"", text.escape_unicode()),
            // A raw string cannot contain a carriage return.
            Self::Raw if text.contains('\r') => format!("{text:?}"),
            Self::Raw => {
                let hashes = "#".repeat(
                    text.split('"')
                        .skip(1)
                        .map(leading_hashes)
                        .max()
                        .unwrap_or(0)
                        + 1,
                );
                format!("r{hashes}\"{text}\"{hashes}")
            }
            Self::Continued(at) => {
                let chars: Vec<char> = text.chars().collect();
                let at = at.index(chars.len() + 1);
                let [before, after]: [String; 2] =
                    [&chars[..at], &chars[at..]].map(|part| part.iter().collect());
                // Rust skips white space after the end of the line, so it is escaped where it is
                // part of the text.
                let blank = after.chars().next().is_some_and(char::is_whitespace);
                let after = if blank {
                    after.escape_unicode().to_string()
                } else {
                    after.escape_default().to_string()
                };
                format!("\"{}\\\n        {after}\"", before.escape_default())
            }
        }
    }
}

fn leading_hashes(text: &str) -> usize {
    text.len() - text.trim_start_matches('#').len()
}
