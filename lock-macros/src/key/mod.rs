//! The key of a lock: from the user's format string to calls of the key writer.
//!
//! The string is split here, because a key contains its text unchanged and its values escaped.
//! The contents of placeholders are left to `format_args!`, so that a key formats values exactly
//! as `format!` does.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote_spanned};
use syn::{
    Expr, ExprLit, ExprUnary, Ident, Lit, LitStr, Stmt, Token, UnOp,
    ext::IdentExt as _,
    parse::{ParseStream, Parser as _},
    punctuated::Punctuated,
    spanned::Spanned as _,
};

use crate::{
    args::{end_of_argument, literal},
    runtime::{Runtime, located_at},
};

/// The maximum length of a key, equal to `LockKey::MAX_BYTES`.
const MAX_KEY_BYTES: usize = 512;

/// The keys of a function.
pub(crate) enum Keys {
    /// `key = ..` and `key(..)`.
    One(Key),
    /// `keys(.., ..)`.
    Several(Vec<Key>),
    /// `keys = expr`.
    Expr(Expr),
}

impl Keys {
    /// Parses the contents of the parentheses of `keys(..)`.
    pub(crate) fn from_call(name: &Ident, input: ParseStream<'_>) -> syn::Result<Self> {
        let mut keys = Vec::new();
        while !input.is_empty() {
            keys.push(Key::among_keys(input)?);
            end_of_argument(input)?;
            input.parse::<Option<Token![,]>>()?;
        }
        if keys.is_empty() {
            let message =
                "`keys` needs at least one: write `keys(\"account:{from}\", \"account:{to}\")`";
            return Err(syn::Error::new(name.span(), message));
        }
        Ok(Self::Several(keys))
    }

    /// Converts the value of `keys = ..`.
    pub(crate) fn from_value(value: Expr) -> syn::Result<Self> {
        if has_text(&value) {
            let message = "keys that are text stand in parentheses: write `keys(\"account:{from}\", \"account:{to}\")`";
            return Err(syn::Error::new_spanned(value, message));
        }
        Ok(Self::Expr(value))
    }

    /// Returns the keys that are written separately.
    pub(crate) fn each(&self) -> std::slice::Iter<'_, Key> {
        match self {
            Self::One(key) => std::slice::from_ref(key),
            Self::Several(keys) => keys.as_slice(),
            Self::Expr(_) => &[],
        }
        .iter()
    }
}

/// The key of one lock.
pub(crate) enum Key {
    /// `key = "order:{id}"` and `key("order:{}", order.id)`.
    Template(Template),
    /// `key = expr`.
    Expr(Expr),
}

/// A split format string.
pub(crate) struct Template {
    span: Span,
    pieces: Vec<Piece>,
    /// The arguments after the string. They are evaluated once, in order, however the string
    /// uses them.
    arguments: Vec<Expr>,
}

enum Piece {
    Text(String),
    /// A variable, and a format string with a single placeholder that captures it.
    Capture(String, LitStr),
    /// A format string with a single placeholder, and the index of its argument.
    Argument(LitStr, usize),
}

impl Key {
    /// Converts the value of `key = ..`.
    pub(crate) fn from_value(value: Expr) -> syn::Result<Self> {
        match literal(&value) {
            Some(Lit::Str(text)) => Template::new(text, Arguments::none()).map(Self::Template),
            Some(other) => Err(syn::Error::new_spanned(
                other,
                "a key is text: write `key = \"order:{id}\"`",
            )),
            // As an expression it would be used unchanged, including the braces, for every call.
            None if is_text(&value) => {
                let message = "a key that is text stands alone: write `key = \"order:{id}\"`";
                Err(syn::Error::new_spanned(value, message))
            }
            None => Ok(Self::Expr(value)),
        }
    }

    /// Parses the contents of the parentheses of `key(..)`.
    pub(crate) fn from_call(input: ParseStream<'_>) -> syn::Result<Self> {
        let Ok(text) = input.parse::<LitStr>() else {
            return Err(input.error(
                "`key(..)` begins with a format string: write `key(\"order:{}\", order.id)`",
            ));
        };
        end_of_argument(input)?;
        input.parse::<Option<Token![,]>>()?;
        Template::new(&text, Arguments::parse(input)?).map(Self::Template)
    }

    /// Parses one entry of `keys(..)`: a string, an expression, or `key(..)` for a string with
    /// arguments.
    fn among_keys(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.peek(Ident)
            && input.peek2(syn::token::Paren)
            && input.fork().parse::<Ident>()? == "key"
        {
            input.parse::<Ident>()?;
            let content;
            syn::parenthesized!(content in input);
            return Self::from_call(&content);
        }
        Self::from_value(input.parse()?)
    }

    /// Returns the key if it is a format string.
    pub(crate) fn template(&self) -> Option<&Template> {
        match self {
            Self::Template(template) => Some(template),
            Self::Expr(_) => None,
        }
    }

    /// Returns the variables that the format string captures, and their spans.
    pub(crate) fn captures(&self) -> impl Iterator<Item = (&str, Span)> {
        let pieces = self.template().map_or(&[][..], |template| &template.pieces);
        pieces.iter().filter_map(|piece| match piece {
            Piece::Capture(name, format) => Some((name.as_str(), format.span())),
            Piece::Text(_) | Piece::Argument(..) => None,
        })
    }

    /// Expands to an expression of type `Result<LockKey, LockError>`.
    pub(crate) fn expand(&self, runtime: &Runtime) -> TokenStream {
        match self {
            Self::Template(template) => template.expand(runtime),
            Self::Expr(expr) => {
                // The user's own span, so that the error for a type that is not a key points
                // there and nowhere else. Called as a function, because the compiler reports a
                // method that moves a key at length if the body needs the key as well.
                let span = expr.span();
                let rt = runtime.at(span);
                quote_spanned!(span=> #rt::IntoLockKey::into_lock_key(::core::convert::identity(#expr)))
            }
        }
    }
}

impl Template {
    fn new(text: &LitStr, arguments: Arguments) -> syn::Result<Self> {
        let error = |message: String| syn::Error::new(text.span(), message);
        let source = text.value();
        if source.is_empty() {
            return Err(error(
                "the key is empty: name what is locked, such as \"order:{id}\"".into(),
            ));
        }
        let parts = split(&source).map_err(error)?;
        if let Some(complaint) = complaint(&parts) {
            return Err(error(complaint.into()));
        }

        let mut used = vec![false; arguments.values.len()];
        let mut next = 0;
        let mut pieces = Vec::with_capacity(parts.len());
        for part in parts {
            let (name, spec) = match part {
                Part::Text(text) => {
                    pieces.push(Piece::Text(text));
                    continue;
                }
                Part::Hole { name, spec } => (name, spec),
            };
            let index = arguments.resolve(name, &mut next, &source).map_err(error)?;
            // With the span of the user's literal, captured names resolve in the user's scope,
            // and errors point to the user's line.
            pieces.push(match index {
                None => Piece::Capture(
                    name.to_owned(),
                    LitStr::new(&format!("{{{name}{spec}}}"), text.span()),
                ),
                Some(index) => {
                    used[index] = true;
                    Piece::Argument(LitStr::new(&format!("{{{spec}}}"), text.span()), index)
                }
            });
        }
        for ((name, value), used) in arguments.values.iter().zip(used) {
            if !used {
                let place = name
                    .as_ref()
                    .map_or_else(|| "{}".into(), |name| format!("{{{}}}", name.unraw()));
                let message = format!(
                    "the key does not use this argument: write `{place}` into it, or drop the argument"
                );
                return Err(syn::Error::new_spanned(value, message));
            }
        }
        Ok(Self {
            span: text.span(),
            pieces,
            arguments: arguments
                .values
                .into_iter()
                .map(|(_, value)| value)
                .collect(),
        })
    }

    /// Returns the span of the format string.
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Returns whether the key is the same for every call.
    pub(crate) fn is_constant(&self) -> bool {
        self.pieces
            .iter()
            .all(|piece| matches!(piece, Piece::Text(_)))
    }

    fn expand(&self, runtime: &Runtime) -> TokenStream {
        let span = Span::mixed_site();
        let rt = runtime.at(span);
        let bound = |index: usize| {
            format_ident!(
                "__a{index}",
                span = located_at(self.arguments[index].span())
            )
        };
        let calls = self.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => quote_spanned!(span=> .lit(#text)),
            Piece::Capture(_, format) => quote_spanned!(span=> .arg(::core::format_args!(#format))),
            Piece::Argument(format, index) => {
                let bound = bound(*index);
                quote_spanned!(span=> .arg(::core::format_args!(#format, #bound)))
            }
        });
        let write = quote_spanned!(span=> #rt::key(|__k| { __k #(#calls)*; }));
        if self.arguments.is_empty() {
            return write;
        }
        // Outside of the closure, so that `?` and `.await` in an argument belong to the function;
        // by reference, so that the body still owns the values of the key.
        let arguments = &self.arguments;
        let names = (0..arguments.len()).map(bound);
        quote_spanned!(span=> match (#(&(#arguments),)*) { (#(#names,)*) => #write })
    }
}

/// The arguments after the format string.
struct Arguments {
    /// `None` for `key = ".."`, which takes no arguments.
    positional: Option<usize>,
    /// Positional ones first.
    values: Vec<(Option<Ident>, Expr)>,
}

impl Arguments {
    fn none() -> Self {
        Self {
            positional: None,
            values: Vec::new(),
        }
    }

    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut values: Vec<(Option<Ident>, Expr)> = Vec::new();
        while !input.is_empty() {
            let name = if input.peek(Ident::peek_any)
                && input.peek2(Token![=])
                && !input.peek2(Token![==])
            {
                let name = input.call(Ident::parse_any)?;
                input.parse::<Token![=]>()?;
                Some(name)
            } else {
                None
            };
            match &name {
                Some(name)
                    if values.iter().any(|(other, _)| {
                        other.as_ref().is_some_and(|o| o.unraw() == name.unraw())
                    }) =>
                {
                    return Err(syn::Error::new(
                        name.span(),
                        format!("`{name}` is given twice: keep one"),
                    ));
                }
                None if values.iter().any(|(name, _)| name.is_some()) => {
                    return Err(input
                        .error("arguments without a name come first: move this one to the front"));
                }
                _ => values.push((name, input.parse()?)),
            }
            end_of_argument(input)?;
            input.parse::<Option<Token![,]>>()?;
        }
        let positional = values.iter().filter(|(name, _)| name.is_none()).count();
        Ok(Self {
            positional: Some(positional),
            values,
        })
    }

    /// Returns the index of the argument for a placeholder with this name, or `None` if it
    /// captures a variable.
    ///
    /// `next` counts the `{}` so far. `source` is the whole string, for the advice in errors.
    fn resolve(&self, name: &str, next: &mut usize, source: &str) -> Result<Option<usize>, String> {
        let index = if name.is_empty() {
            *next += 1;
            *next - 1
        } else if name.bytes().all(|byte| byte.is_ascii_digit()) {
            // A number that does not fit is beyond the end of any list.
            name.parse().unwrap_or(usize::MAX)
        } else if name == "_" {
            return Err(
                "`{_}` names nothing: give the argument a name, and write it here".to_owned(),
            );
        } else if let Some(plain) = name.strip_prefix("r#") {
            return Err(format!(
                "inside of a string a name is written without `r#`: write `{{{plain}}}`"
            ));
        } else if Ident::parse_any.parse_str(name).is_err() {
            let hole = source.replacen(name, "", 1);
            return Err(format!(
                "only a variable can stand inside of a string: write `key({hole:?}, {name})`"
            ));
        } else {
            // `{type}` refers to `r#type = ..`, just as it captures an argument `r#type`.
            return Ok(self
                .values
                .iter()
                .position(|(given, _)| given.as_ref().is_some_and(|given| given.unraw() == name)));
        };
        match self.positional {
            None => Err(format!(
                "`{{{name}}}` has no value: name a variable in it, such as `{{id}}`, or write `key({source:?}, value)`"
            )),
            Some(positional) if index < positional => Ok(Some(index)),
            Some(positional) => Err(format!(
                "the key has more placeholders than values ({positional}): give one after the string for each"
            )),
        }
    }
}

/// Returns whether the expression is a string literal in any wrapping: `("..")`, `&".."`,
/// `"..".to_owned()`, `String::from("..")`, `concat!("..")`.
fn is_text(expr: &Expr) -> bool {
    match expr {
        Expr::Lit(ExprLit {
            lit: Lit::Str(_), ..
        }) => true,
        Expr::Group(group) => is_text(&group.expr),
        Expr::Paren(paren) => is_text(&paren.expr),
        Expr::Reference(reference) => is_text(&reference.expr),
        Expr::Unary(ExprUnary {
            op: UnOp::Deref(_),
            expr,
            ..
        }) => is_text(expr),
        Expr::Try(attempt) => is_text(&attempt.expr),
        Expr::MethodCall(call) => call.args.is_empty() && is_text(&call.receiver),
        Expr::Call(call) => {
            call.args.len() == 1 && call.args.iter().all(is_text) && is_constructor(&call.func)
        }
        Expr::Block(block) => match &*block.block.stmts {
            [Stmt::Expr(value, None)] => is_text(value),
            _ => false,
        },
        Expr::Macro(call) => call.mac.path.is_ident("concat"),
        _ => false,
    }
}

/// Returns whether the expression is a constructor such as `String::from` or `LockKey::new`.
fn is_constructor(expr: &Expr) -> bool {
    let Expr::Path(path) = expr else { return false };
    path.path
        .segments
        .last()
        .is_some_and(|last| last.ident == "from" || last.ident == "new")
}

/// Returns whether the expression is a list with a string literal.
fn has_text(expr: &Expr) -> bool {
    match expr {
        Expr::Array(array) => array.elems.iter().any(is_text),
        Expr::Repeat(repeat) => is_text(&repeat.expr),
        Expr::Group(group) => has_text(&group.expr),
        Expr::Paren(paren) => has_text(&paren.expr),
        Expr::Reference(reference) => has_text(&reference.expr),
        Expr::MethodCall(call) => has_text(&call.receiver),
        Expr::Macro(call) if call.mac.path.is_ident("vec") => {
            let elements =
                Punctuated::<Expr, Token![,]>::parse_terminated.parse2(call.mac.tokens.clone());
            elements.is_ok_and(|elements| elements.iter().any(is_text))
        }
        _ => is_text(expr),
    }
}

/// A piece of a format string, as written.
#[derive(Debug, PartialEq)]
enum Part<'a> {
    /// Text with `{{` and `}}` resolved.
    Text(String),
    /// `{name:spec}`; `spec` keeps its colon.
    Hole { name: &'a str, spec: &'a str },
}

/// Splits a format string like `std::fmt`.
fn split(source: &str) -> Result<Vec<Part<'_>>, String> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = source;
    while let Some(at) = rest.find(['{', '}']) {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix("{{") {
            text.push('{');
            rest = after;
        } else if let Some(after) = rest.strip_prefix("}}") {
            text.push('}');
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            if !text.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut text)));
            }
            let (hole, after) = split_hole(after)?;
            parts.push(hole);
            rest = after;
        } else {
            return Err("a `}` has no `{` before it: write `}}` for a brace in the key".into());
        }
    }
    text.push_str(rest);
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
    Ok(parts)
}

/// Splits the text after a `{` into the placeholder and the rest.
fn split_hole(source: &str) -> Result<(Part<'_>, &str), String> {
    let (name, rest) = source.split_at(source.find([':', '{', '}']).unwrap_or(source.len()));
    let from = rest.strip_prefix(':').map_or(0, |spec| 1 + fill(spec));
    let end = rest[from..]
        .find(['{', '}'])
        .map(|at| from + at)
        .filter(|end| rest[*end..].starts_with('}'));
    let Some(end) = end else {
        return Err(if rest.starts_with(":}") {
            format!("`{{{name}:}}` has a `:` and no format after it: write `{{{name}}}`")
        } else {
            "a `{` is not closed: write `}` after the name, or `{{` for a brace in the key".into()
        });
    };
    let (spec, after) = (&rest[..end], &rest[end + 1..]);
    if name.starts_with(char::is_whitespace) && !name.trim().is_empty() {
        return Err(format!(
            "`{{{name}{spec}}}` has a blank before the name: write `{{{}{spec}}}`",
            name.trim()
        ));
    }
    if rest[from..end].contains('$') || rest[from..end].contains(".*") {
        return Err(format!(
            "`{{{name}{spec}}}` takes its width or precision from an argument, which a key cannot: write the number"
        ));
    }
    let letters = rest[from..end]
        .trim_end()
        .trim_start_matches(|c: char| !c.is_ascii_alphabetic() && c != '?');
    if !["", "?", "x?", "X?", "x", "X", "o", "b", "p", "e", "E"].contains(&letters) {
        return Err(format!(
            "`{{{name}{spec}}}` has an unknown format, `{letters}`: write `{{{name}}}`"
        ));
    }
    Ok((
        Part::Hole {
            name: name.trim_end(),
            spec: spec.trim_end(),
        },
        after,
    ))
}

/// Returns the length of the fill at the start of a spec: any character, including a brace,
/// before `<`, `^` or `>`.
fn fill(spec: &str) -> usize {
    let mut chars = spec.chars();
    match (chars.next(), chars.next()) {
        (Some(fill), Some('<' | '^' | '>')) => fill.len_utf8(),
        _ => 0,
    }
}

/// Returns the reason why the runtime would reject every key with these parts.
fn complaint(parts: &[Part<'_>]) -> Option<&'static str> {
    let mut text_bytes = 0;
    // Values are escaped, so a letter can stand in for each.
    let name: String = parts
        .iter()
        .map(|part| match part {
            Part::Text(text) => {
                text_bytes += text.len();
                text.as_str()
            }
            Part::Hole { .. } => "x",
        })
        .collect();
    if text_bytes > MAX_KEY_BYTES {
        return Some("the key is longer than 512 bytes: shorten it");
    }
    if name.chars().any(char::is_control) {
        return Some("the key contains a control character: leave it out");
    }
    let tagged = name
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .is_some_and(|(tag, _)| !tag.is_empty());
    if name.contains('}') && !tagged {
        return Some(
            "the key contains `}` outside of a hash tag: write `{{tag}}` whole, or leave the brace out",
        );
    }
    if name.starts_with("permits:") {
        return Some("`permits:` is reserved as the beginning of a key: choose another first word");
    }
    None
}

#[cfg(test)]
mod tests;
