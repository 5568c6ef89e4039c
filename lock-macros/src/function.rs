//! The function below the attribute: what it has to be, and what is said if it is not.
//!
//! Only attributes, visibility and signature are parsed. The body stays a run of tokens, so that code which is still being
//! typed does not break the attribute. A plain function is looked into, as it may be what `#[async_trait]` has made of an
//! `async fn`.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens as _;
use syn::{
    Attribute, Block, Expr, GenericArgument, Ident, Local, Pat, Path, PathArguments, ReturnType, Signature, Stmt,
    Token, Type, TypeParamBound, Visibility,
    ext::IdentExt as _,
    parse::{Parse, ParseStream, Parser as _},
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_pat_ident_mut},
};

use crate::args::{Args, nearest};

/// A function that can be locked.
pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) sig: Signature,
    pub(crate) brace: Brace,
    pub(crate) inner_attrs: Vec<Attribute>,
    pub(crate) work: Work,
}

/// What is done under the lock.
pub(crate) enum Work {
    /// The body of an `async fn`.
    Async(TokenStream),
    /// The body of a function that is nothing but `Box::pin(async move { .. })`.
    Boxed(Boxed),
}

pub(crate) struct Boxed {
    /// `Box::pin`.
    pub(crate) pin: Expr,
    /// `async move`.
    pub(crate) r#async: TokenStream,
    /// Patterns of arguments, which `#[async_trait]` moves into the body, and a key may name what they bind.
    pub(crate) patterns: Vec<Local>,
    pub(crate) brace: Brace,
    pub(crate) body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        if !begins_a_function(input) {
            return Err(input.error("`#[distributed_lock]` goes on an `async fn`: put it on a function or a method"));
        }
        let sig: Signature = input.parse()?;
        if let Some(constness) = &sig.constness {
            return Err(syn::Error::new(constness.span, "a `const fn` cannot wait for a lock: make it an `async fn`"));
        }
        if input.peek(Token![;]) {
            return Err(
                input.error("there is no body here to lock: put `#[distributed_lock]` on the method that has it")
            );
        }
        let content;
        let brace = syn::braced!(content in input);
        let inner_attrs = content.call(Attribute::parse_inner)?;
        let body: TokenStream = content.parse()?;
        let work = match (&sig.asyncness, boxed(&sig, &body)) {
            (Some(_), _) => Work::Async(body),
            (None, Some(boxed)) => Work::Boxed(boxed),
            (None, None) => return Err(not_async(&sig, &body)),
        };
        let function = Self { attrs, vis, sig, brace, inner_attrs, work };
        match function.returns() {
            Some(ty @ Type::Never(_)) => {
                let message = "a function that never returns cannot report that the lock was lost: return a `Result` \
                               with `std::convert::Infallible` in its `Ok`";
                Err(syn::Error::new(ty.span(), message))
            }
            _ => Ok(function),
        }
    }
}

/// Is there an `fn` ahead, with nothing before it but `const`, `async`, `unsafe`, `extern "C"`?
fn begins_a_function(input: ParseStream<'_>) -> bool {
    let ahead = input.fork();
    while ahead.peek(Ident::peek_any) || ahead.peek(syn::LitStr) {
        if ahead.peek(Token![fn]) {
            return true;
        }
        if ahead.parse::<proc_macro2::TokenTree>().is_err() {
            break;
        }
    }
    false
}

/// Takes `Box::pin(async move { .. })` apart, if the body is that and nothing else: what stood before it would be done
/// without the lock.
fn boxed(sig: &Signature, body: &TokenStream) -> Option<Boxed> {
    if sig.asyncness.is_some() {
        return None;
    }
    let mut statements = Block::parse_within.parse2(body.clone()).ok()?;
    let (Some(Stmt::Expr(Expr::Call(mut call), None)), None) = (statements.pop(), statements.pop()) else {
        return None;
    };
    let Expr::Path(pin) = &*call.func else { return None };
    let (Some(Expr::Async(mut block)), None) = (call.args.pop(), call.args.pop()) else {
        return None;
    };
    if !ends_with(&pin.path, ["Box", "pin"]) || block.capture.is_none() {
        return None;
    }
    let (patterns, rest): (Vec<_>, Vec<_>) =
        block.block.stmts.into_iter().partition(|statement| moved_pattern(statement).is_some());
    let patterns = patterns.iter().filter_map(moved_pattern).cloned().collect();
    let body = rest.iter().map(quote::ToTokens::to_token_stream).collect();
    block.block.stmts = Vec::new();
    let (async_token, capture) = (block.async_token, block.capture);
    Some(Boxed {
        pin: *call.func,
        r#async: quote::quote!(#async_token #capture),
        patterns,
        brace: block.block.brace_token,
        body,
    })
}

/// Does the path end in these two words?
fn ends_with(path: &Path, words: [&str; 2]) -> bool {
    let mut segments = path.segments.iter().rev().map(|segment| &segment.ident);
    let [first, last] = words;
    segments.next().is_some_and(|ident| ident == last) && segments.next().is_some_and(|ident| ident == first)
}

/// `let PATTERN = { let __arg1 = __arg1; __arg1 };`, as `#[async_trait]` writes it.
fn moved_pattern(statement: &Stmt) -> Option<&Local> {
    let Stmt::Local(local) = statement else { return None };
    let Expr::Block(init) = &*local.init.as_ref()?.expr else { return None };
    let [Stmt::Local(argument), Stmt::Expr(Expr::Path(path), None)] = &*init.block.stmts else { return None };
    let Pat::Ident(argument) = &argument.pat else { return None };
    let argument = &argument.ident;
    (path.path.is_ident(argument) && argument.to_string().starts_with("__arg")).then_some(local)
}

/// What is said of a function that cannot wait.
fn not_async(sig: &Signature, body: &TokenStream) -> syn::Error {
    let name = &sig.ident;
    let message = if body.to_string().contains("block_on") {
        format!(
            "`{name}` is not asynchronous any more: an attribute above, such as `#[tokio::test]`, has made it a plain \
             function; put `#[distributed_lock]` above that one"
        )
    } else if returns_a_future(sig) {
        format!(
            "`{name}` is no `async fn`: write `async fn {name}`, or make `Box::pin(async move {{ .. }})` its whole body, so \
             that nothing of it is done without the lock"
        )
    } else {
        format!("waiting for a lock is asynchronous: write `async fn {name}`")
    };
    syn::Error::new(sig.fn_token.span, message)
}

/// `Pin<Box<dyn Future<..>>>`, `BoxFuture<..>`, `impl Future<..>`, by its words alone: an alias or a path changes nothing
/// about the advice.
fn returns_a_future(sig: &Signature) -> bool {
    sig.output.to_token_stream().into_iter().any(|token| contains_future(&token))
}

fn contains_future(token: &proc_macro2::TokenTree) -> bool {
    match token {
        proc_macro2::TokenTree::Ident(ident) => ident.to_string().ends_with("Future"),
        proc_macro2::TokenTree::Group(group) => group.stream().into_iter().any(|token| contains_future(&token)),
        _ => false,
    }
}

impl Function {
    /// The type of what the caller awaits; `None` for `()` that is not written, or a future behind an alias.
    pub(crate) fn returns(&self) -> Option<&Type> {
        let ReturnType::Type(_, ty) = &self.sig.output else { return None };
        match self.work {
            Work::Async(_) => Some(ty),
            Work::Boxed(_) => boxed_output(ty),
        }
    }

    /// Refuses what does not go with the arguments of the attribute.
    pub(crate) fn check(&self, args: &Args) -> syn::Result<()> {
        let mut arguments = Bindings::default();
        arguments.visit_signature_mut(&mut self.sig.clone());
        if let Work::Boxed(boxed) = &self.work {
            boxed.patterns.iter().for_each(|local| arguments.visit_pat_mut(&mut local.pat.clone()));
        }
        self.check_captures(args, &arguments)?;
        match &args.guard {
            Some(guard) if arguments.names.iter().any(|name| guard.unraw() == name) => {
                let message = format!("`guard = {guard}` hides the argument `{guard}`: take another name");
                Err(syn::Error::new(guard.span(), message))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a key that captures what is no argument.
    ///
    /// The compiler would refuse it too, but it cannot look into a string that was taken apart: it would propose to replace the
    /// whole key by the variable that was meant. A capital letter may begin a constant, which is the compiler's to know.
    fn check_captures(&self, args: &Args, arguments: &Bindings) -> syn::Result<()> {
        let missing = args.keys.each().flat_map(|key| key.captures()).find(|(name, _)| {
            name.starts_with(|first: char| first.is_lowercase() || first == '_')
                && !arguments.names.iter().any(|n| n == name)
        });
        match missing {
            Some((name, span)) if !arguments.hidden => {
                let hint = match nearest(name, arguments.names.iter().map(String::as_str)) {
                    Some(near) => format!("did you mean `{{{near}}}`?"),
                    None => "a key is made of what the function is called with, or of constants".to_owned(),
                };
                Err(syn::Error::new(span, format!("`{}` has no argument `{name}`: {hint}", self.sig.ident)))
            }
            _ => Ok(()),
        }
    }
}

/// `T` of `Pin<Box<dyn Future<Output = T>>>`.
fn boxed_output(ty: &Type) -> Option<&Type> {
    let Type::TraitObject(object) = argument_of(argument_of(ty, "Pin")?, "Box")? else { return None };
    object.bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else { return None };
        let segment = bound.path.segments.last().filter(|segment| segment.ident == "Future")?;
        let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return None };
        arguments.args.iter().find_map(|argument| match argument {
            GenericArgument::AssocType(assoc) if assoc.ident == "Output" => Some(&assoc.ty),
            _ => None,
        })
    })
}

/// `T` of `Name<T>`.
fn argument_of<'a>(ty: &'a Type, name: &str) -> Option<&'a Type> {
    let Type::Path(path) = ty else { return None };
    let segment = path.path.segments.last().filter(|segment| segment.ident == name)?;
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return None };
    arguments.args.iter().find_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    })
}

/// The names that the arguments of a function bind.
#[derive(Default)]
struct Bindings {
    names: Vec<String>,
    /// A macro stands for a pattern: there may be more names.
    hidden: bool,
}

impl VisitMut for Bindings {
    fn visit_pat_ident_mut(&mut self, pat: &mut syn::PatIdent) {
        self.names.push(pat.ident.unraw().to_string());
        visit_pat_ident_mut(self, pat);
    }

    fn visit_receiver_mut(&mut self, _: &mut syn::Receiver) {
        self.names.push("self".to_owned());
    }

    fn visit_macro_mut(&mut self, _: &mut syn::Macro) {
        self.hidden = true;
    }
}

/// The spans of the first and the last token. The compiler joins what a stable macro cannot.
pub(crate) fn ends(tokens: &impl quote::ToTokens) -> (Span, Span) {
    let mut spans = tokens.to_token_stream().into_iter().map(|token| token.span());
    let start = spans.next().unwrap_or_else(Span::call_site);
    (start, spans.last().unwrap_or(start))
}
