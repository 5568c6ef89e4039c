//! The expansion: the function as it was written, with its body behind a lock. The body occurs in
//! the output once.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::{
    Expr, ReturnType, Type,
    ext::IdentExt as _,
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_type_mut},
};

use crate::{
    args::{Args, OnBusy},
    function::{AsyncBlock, Bindings, Function, Work},
    key::Keys,
    runtime::{Runtime, ends, located_at},
    spec::duration,
};

/// Expands to the locked function, or to the unchanged item and the errors.
pub(crate) fn expand(args: TokenStream, item: TokenStream) -> TokenStream {
    let function = syn::parse2::<Function>(item.clone());
    // Without the key, a variable that only the key names is unused.
    let unused = function.is_ok().then(|| quote!(#[allow(unused_variables)]));
    let error = match (function, syn::parse2::<Args>(args)) {
        (Ok(function), Ok(args)) => match function.check(&args) {
            Ok(()) => return Expansion::new(args).function(function),
            Err(error) => error,
        },
        (Err(mut error), Err(more)) => {
            error.combine(more);
            error
        }
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => error,
    };
    let error = error.into_compile_error();
    if syn::parse2::<Expr>(item.clone()).is_ok() {
        // An expression cannot have items beside it.
        return error;
    }
    // Without the item, each use of it would be a further error, and editors would not know it.
    quote!(#unused #item #error)
}

/// The arguments of the attribute, to be applied to a function.
struct Expansion {
    args: Args,
    runtime: Runtime,
}

impl Expansion {
    fn new(mut args: Args) -> Self {
        let runtime = Runtime::new(args.runtime.take());
        Self { args, runtime }
    }

    fn function(&self, function: Function) -> TokenStream {
        let returned = Returned::by(&function);
        let name = function.sig.ident.unraw().to_string();
        let arguments = function.arguments();
        let Function {
            attrs,
            vis,
            sig,
            brace,
            inner_attrs,
            work,
        } = function;
        let work = match work {
            Work::Async(body) => self.locked(&name, &returned, arguments, brace, body),
            Work::Block(block) => {
                let AsyncBlock {
                    pin,
                    keywords,
                    arguments: bound,
                    brace,
                    body,
                } = *block;
                let locked = self.locked(&name, &returned, arguments, brace, body);
                let mut block = TokenStream::new();
                brace.surround(&mut block, |block| block.extend(quote!(#(#bound)* #locked)));
                match pin {
                    Some(pin) => quote!(#pin(#keywords #block)),
                    None => quote!(#keywords #block),
                }
            }
        };
        let mut block = TokenStream::new();
        brace.surround(&mut block, |block| {
            block.extend(quote!(#(#inner_attrs)* #work))
        });
        quote!(#(#attrs)* #vis #sig #block)
    }

    /// Expands to the body behind the lock: statements, and an expression of the function's
    /// return type.
    ///
    /// The client, the key and the spec are evaluated before the body captures its variables,
    /// because `client = self.locks` borrows from values that the body may move. The body is not
    /// passed to an async function, whose future would contain it twice.
    fn locked(
        &self,
        function: &str,
        returned: &Returned,
        arguments: Bindings,
        brace: Brace,
        body: TokenStream,
    ) -> TokenStream {
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        let client = self.client(function);
        let request = self.request();
        let name = self.name();
        let (held, named) = self.held();
        let anchor = returned.anchor();
        // Captures the whole argument. If the body used only a field of it, or a `Copy` part, the
        // block would capture only that, and the rest would be dropped after the release.
        let used = arguments.within(&body).map(|argument| {
            let span = located_at(argument.span());
            quote_spanned!(span=> let _ = &#argument;)
        });
        let used: TokenStream = used.collect();
        let busy = self.busy(returned);
        let refused = self.refused(returned);
        // The user's own braces around a single expression would be reported as unnecessary.
        let is_single = !body
            .clone()
            .into_iter()
            .any(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ';'));
        let mut block = Group::new(Delimiter::Brace, body);
        block.set_span(if is_single {
            located_at(brace.span.join())
        } else {
            brace.span.join()
        });
        // The user's own span: the compiler does not name the variables of a macro's block.
        let open = brace.span.open();
        let mut outer = Group::new(Delimiter::Brace, quote!(#named #used #anchor #block));
        outer.set_span(open);
        let future = quote_spanned!(open=> async move #outer);
        let import = self.runtime.import();
        let (entering, entered) = match &self.args.once {
            None => (
                quote_spanned!(span=> #rt::enter(__request, #name)),
                quote_spanned! {span=>
                    ::core::result::Result::Ok(__entered) => {
                        #held
                        #rt::run(__entered, #future, |__returned| {
                            #rt::Returned(__returned, #rt::Plain).is_failure()
                        })
                        .await
                    }
                },
            ),
            Some(keep) => {
                let keep = duration(keep);
                (
                    quote_spanned!(span=> #rt::begin(__request, #name, #keep)),
                    quote_spanned! {span=>
                        ::core::result::Result::Ok(#rt::Entered::Fresh(__entered)) => {
                            #held
                            #rt::run_once(__entered, #future).await
                        }
                        ::core::result::Result::Ok(#rt::Entered::Done(__done)) => {
                            #rt::replay(__done)
                        }
                    },
                )
            }
        };
        quote_spanned! {span=>
            #import
            let __client = #client;
            let __request = #request;
            let __outcome = match #entering.await {
                #entered
                #busy
                ::core::result::Result::Err(__error) => ::core::result::Result::Err(__error),
            };
            match __outcome {
                ::core::result::Result::Ok(__returned) => __returned,
                ::core::result::Result::Err(__error) => #refused,
            }
        }
    }

    /// Expands to the client. `name` is the function's name, for errors.
    fn client(&self, name: &str) -> TokenStream {
        match &self.args.client {
            None => {
                let span = Span::mixed_site();
                let rt = self.runtime.at(span);
                quote_spanned!(span=> #rt::ambient(::core::concat!(::core::module_path!(), "::", #name)))
            }
            Some(client) => {
                let client = client.cloned(|span| {
                    let rt = self.runtime.at(span);
                    quote_spanned!(span=> #rt::LockClient)
                });
                quote!(::core::result::Result::Ok(#client))
            }
        }
    }

    /// Expands to the name of the request.
    fn name(&self) -> TokenStream {
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        match &self.args.name {
            Some(name) => quote!(#name),
            None => quote_spanned!(span=> #rt::path_of(|| ())),
        }
    }

    fn request(&self) -> TokenStream {
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        let spec = self.args.spec.expand(&self.runtime);
        match &self.args.keys {
            Keys::One(key) => {
                let key = key.expand(&self.runtime);
                quote_spanned!(span=> #rt::one(__client, #key, #spec))
            }
            Keys::Several(keys) => {
                let keys = keys.iter().map(|key| key.expand(&self.runtime));
                quote_spanned!(span=> #rt::LockKeys::all([#(#keys),*], __client, #spec))
            }
            Keys::Expr(keys) => {
                // The user's own span, so that the error for a type that is not a list of keys
                // points there and nowhere else.
                let span = keys.span();
                let rt = self.runtime.at(span);
                let client = Ident::new("__client", Span::mixed_site());
                quote_spanned!(span=> #rt::LockKeys::all(::core::convert::identity(#keys), #client, #spec))
            }
        }
    }

    /// Expands to the body's name for its lock: a statement in front of the body, and one at its
    /// start.
    fn held(&self) -> (TokenStream, TokenStream) {
        let Some(name) = &self.args.held else {
            return Default::default();
        };
        let span = Span::mixed_site();
        let rt = self.runtime.at(span);
        // The same name, for errors that mention it, unless it is the only other name here.
        let mut held = if name == "__entered" {
            Ident::new("__held", name.span())
        } else {
            name.clone()
        };
        held.set_span(located_at(name.span()));
        let borrow = quote_spanned!(name.span()=> &#held);
        (
            quote_spanned!(span=> let #held = __entered.held();),
            quote_spanned!(span=> let #name: &#rt::HeldLock = #borrow;),
        )
    }

    /// Expands to the match arm for a lock that is held elsewhere.
    fn busy(&self, returned: &Returned) -> TokenStream {
        let span = Span::mixed_site();
        let value = match &self.args.on_busy {
            None => return TokenStream::new(),
            Some(OnBusy::Skip(word)) => {
                let rt = self.runtime.at(*word);
                quote_spanned!(*word=> #rt::Skipped::skipped())
            }
            Some(OnBusy::Return(expr)) => returned.typed(quote!(#expr)),
        };
        let rt = self.runtime.at(span);
        // A `return`, so that the compiler reports a value of another type. The value may itself
        // be a `return`.
        quote_spanned! {span=>
            ::core::result::Result::Err(__error) if #rt::is_busy(&__error) => {
                #[allow(unreachable_code, clippy::diverging_sub_expression, clippy::needless_return)]
                return #value;
            }
        }
    }

    /// Expands `__error` to the return value of the function.
    fn refused(&self, returned: &Returned) -> TokenStream {
        let error = Ident::new("__error", Span::mixed_site());
        if let Some(map) = &self.args.map_err {
            // Not the user's own spans, because the compiler would suggest wrapping the function
            // in `Err`.
            let (start, end) = ends(map);
            let start = located_at(start);
            let rt = self.runtime.at(start);
            let mut arguments = Group::new(Delimiter::Parenthesis, quote!(#map, #error));
            arguments.set_span(located_at(end));
            let ty = returned
                .inferred()
                .filter(|_| matches!(map, Expr::Closure(_)))
                .map(|ty| quote!(::<#ty>));
            return returned.typed(quote_spanned!(start=> #rt::map_err #ty #arguments));
        }
        // The user's own spans, first and last token, so that only a type that cannot hold the
        // error is underlined.
        let (start, end) = returned.ends;
        let rt = self.runtime.at(start);
        let mut call = quote_spanned!(start=> #rt::FromLockError::);
        call.extend(quote_spanned!(end=> from_lock_error(#error)));
        call
    }
}

/// The return type of a function, and its spans.
struct Returned {
    /// `None` if only the compiler knows it.
    ty: Option<Type>,
    ends: (Span, Span),
}

impl Returned {
    fn by(function: &Function) -> Self {
        let ends = match (function.returns(), &function.sig.output) {
            (Some(ty), _) => ends(ty),
            (None, ReturnType::Type(_, ty)) => ends(ty),
            (None, ReturnType::Default) => (function.sig.ident.span(), function.sig.ident.span()),
        };
        Self {
            ty: function.output(),
            ends,
        }
    }

    /// Expands to a `return` that never runs. It is the first one that the compiler sees, so the
    /// body is checked against the declared type, and its errors appear in the same places as
    /// without the attribute.
    fn anchor(&self) -> TokenStream {
        let Some(ty) = self.inferred() else {
            return TokenStream::new();
        };
        let (start, end) = self.ends;
        let mut call = Group::new(Delimiter::Parenthesis, TokenStream::new());
        call.set_span(end);
        let span = located_at(start);
        // The user's own span at both ends: "return type inferred to be" underlines the type.
        let mut closure = Group::new(
            Delimiter::Parenthesis,
            quote_spanned!(span=> || -> #ty { loop {} }),
        );
        closure.set_span(start);
        quote_spanned! {span=>
            #[allow(
                unreachable_code,
                clippy::diverging_sub_expression,
                clippy::empty_loop,
                clippy::needless_return,
                clippy::redundant_closure_call,
                clippy::unused_unit,
            )]
            if false {
                return #closure #call;
            }
        }
    }

    /// Expands to the expression, checked against the declared type.
    fn typed(&self, expr: TokenStream) -> TokenStream {
        let Some(ty) = self.inferred() else {
            return expr;
        };
        quote_spanned!(Span::mixed_site()=> { let __value: #ty = #expr; __value })
    }

    /// Returns the type in a form that is allowed in a body.
    fn inferred(&self) -> Option<Type> {
        let mut ty = self.ty.clone()?;
        InferImplTrait.visit_type_mut(&mut ty);
        Some(ty)
    }
}

/// Replaces `impl Trait`, which `let` does not allow, by `_`, so that it is inferred from the
/// body.
struct InferImplTrait;

impl VisitMut for InferImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if let Type::ImplTrait(_) = ty {
            *ty = syn::parse_quote!(_);
        } else {
            visit_type_mut(self, ty);
        }
    }
}

#[cfg(test)]
mod tests;
